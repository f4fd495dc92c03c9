"""What an installation brings, and what an import does not."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
LIGHT = ["triolet.client", "triolet.server", "triolet.testing", "triolet.wire", "triolet.config"]
HEAVY = {"torch", "transformers", "numpy", "tokenizers", "safetensors", "gguf"}


def modules_after(code):
    """The top-level modules that a fresh interpreter holds after ``code``."""
    listing = "; import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code + listing], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def submodules(package):
    """All modules of ``package``: a package that is empty at its top proves nothing."""
    folder = ROOT / "src" / Path(*package.split("."))
    paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    for path in paths:
        dotted = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        yield dotted.removesuffix(".__init__")


@pytest.mark.slow
@pytest.mark.parametrize("package", LIGHT)
def test_the_light_parts_import_without_torch(package):
    code = "; ".join(f"import {module}" for module in submodules(package))

    assert not modules_after(code) & HEAVY


@pytest.mark.slow
def test_the_command_line_imports_nothing_that_makes_help_slow():
    assert not modules_after("import triolet.cli.main") & (
        HEAVY | {"trio", "hypercorn", "starlette"}
    )


@pytest.mark.slow
def test_python_dash_m_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "triolet", "--version"], capture_output=True, text=True, check=True
    )

    assert done.stdout == f"triolet, version {importlib.metadata.version('triolet')}\n"


def test_it_is_typed_for_those_who_use_it():
    assert (ROOT / "src" / "triolet" / "py.typed").exists()


def pins():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonical(pin.name): pin for pin in found}


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"].values()
    groups = project["dependency-groups"].values()
    return [
        Requirement(text)
        for texts in (project["project"]["dependencies"], *extras, *groups)
        for text in texts
    ]


@pytest.mark.parametrize("wanted", requirements(), ids=str)
def test_each_dependency_is_pinned_to_a_release_that_it_allows(wanted):
    pin = pins()[canonical(wanted.name)]

    (exact,) = pin.specifier
    assert exact.operator == "=="
    assert wanted.specifier.contains(exact.version)
