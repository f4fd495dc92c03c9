"""A library that is compiled on first use, kept where nobody else can write, and never needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from triolet.engine import native  # noqa: E402 - needs torch
from triolet.engine.native import NoLibraryError, load_library  # noqa: E402 - needs torch

pytestmark = pytest.mark.torch

SEVEN = 'extern "C" int seven() { return 7; }\n'


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cache of its own, and a source that compiles in a tenth of a second."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native, "SOURCES", tmp_path / "sources")
    monkeypatch.setattr(native, "FLAGS", ("-fPIC", "-shared"))
    native.SOURCES.mkdir()
    (native.SOURCES / "seven.cpp").write_text(SEVEN)
    return tmp_path / "cache" / "triolet" / "kernels"


@pytest.fixture
def compiler(home, tmp_path, monkeypatch):
    """A stand-in for a compiler, that counts its runs; ``compiler(body)`` says what it does."""
    runs = tmp_path / "runs"
    script = tmp_path / "compiler"

    def behave(body):
        script.write_text(f"#!/bin/sh\necho run >> {runs}\n{body}\n")
        script.chmod(0o700)
        monkeypatch.setenv("CXX", str(script))

    behave.runs = lambda: len(runs.read_text().splitlines()) if runs.exists() else 0
    return behave


needs_compiler = pytest.mark.skipif(
    not any(map(native.shutil.which, native.COMPILERS)), reason="no C++ compiler"
)


def real(*_):
    """What the stand-in does when it is to work: the real one, by its first name found."""
    return f'exec {next(filter(None, map(native.shutil.which, native.COMPILERS)))} "$@"'


def quiet(_):
    pass


@needs_compiler
@pytest.mark.slow
def test_it_is_compiled_once_and_found_again(home, compiler):
    compiler(real())
    lines = []

    assert load_library("seven", progress=lines.append).seven() == 7
    assert load_library("seven", progress=lines.append).seven() == 7

    assert compiler.runs() == 1
    assert lines == ["Compiling seven.cpp for this processor"]
    (built,) = home.iterdir()
    assert built.stat().st_mode & 0o077 == 0
    assert home.stat().st_mode & 0o077 == 0


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("what", ["source", "flags", "processor", "torch"])
def test_it_is_compiled_anew_for_whatever_it_depends_on(home, compiler, monkeypatch, what):
    compiler(real())
    load_library("seven", progress=quiet)
    if what == "source":
        (native.SOURCES / "seven.cpp").write_text(SEVEN.replace("7", "8"))
    elif what == "flags":
        monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-O1"))
    elif what == "processor":
        monkeypatch.setattr(native, "_processor", lambda: "another")
    else:
        monkeypatch.setattr(torch, "__version__", "99")

    got = load_library("seven", progress=quiet).seven()

    assert got == (8 if what == "source" else 7)
    assert compiler.runs() == 2


@needs_compiler
@pytest.mark.slow
def test_processes_that_start_at_once_all_get_it_and_leave_one_file(home):
    code = f"""
from pathlib import Path
from triolet.engine import native
native.SOURCES = Path({str(native.SOURCES)!r})
native.FLAGS = {native.FLAGS!r}
assert native.load_library("seven", progress=print).seven() == 7
"""
    starts = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]

    said = [start.communicate(timeout=110)[0] for start in starts]

    assert [start.returncode for start in starts] == [0, 0, 0]
    assert any("Compiling" in text for text in said)
    assert len(list(home.iterdir())) == 1


@needs_compiler
@pytest.mark.slow
def test_a_file_that_another_user_could_have_written_is_not_loaded(home, compiler):
    compiler(real())
    load_library("seven", progress=quiet)
    (built,) = home.iterdir()
    built.chmod(0o777)

    load_library("seven", progress=quiet)

    assert compiler.runs() == 2
    assert built.stat().st_mode & 0o077 == 0


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["writable by others", "another's", "a file", "no home"])
def test_where_the_cache_cannot_be_trusted_or_used_nothing_is_kept(
    home, compiler, tmp_path, monkeypatch, trouble
):
    compiler(real())
    if trouble == "writable by others":
        home.mkdir(parents=True)
        home.parent.chmod(0o777)
    elif trouble == "another's":
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    elif trouble == "a file":
        home.parent.parent.mkdir()
        home.parent.write_text("")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setattr(Path, "home", lambda: Path("/proc/nowhere"))

    for _ in range(2):
        assert load_library("seven", progress=quiet).seven() == 7

    assert compiler.runs() == 2
    assert not list(tmp_path.rglob("*.so"))


@needs_compiler
@pytest.mark.slow
def test_a_cache_behind_a_link_is_a_cache(home, compiler, tmp_path):
    compiler(real())
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    home.parent.parent.mkdir()
    home.parent.symlink_to(tmp_path / "elsewhere")

    for _ in range(2):
        load_library("seven", progress=quiet)

    assert compiler.runs() == 1
    assert len(list((tmp_path / "elsewhere" / "kernels").iterdir())) == 1


@needs_compiler
@pytest.mark.slow
def test_half_a_library_in_the_cache_is_built_anew(home, compiler):
    compiler(real())
    home.mkdir(parents=True, mode=0o700)
    home.parent.chmod(0o700)
    broken = home / f"seven-{native._fingerprint(native.SOURCES / 'seven.cpp')}.so"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o700)

    assert load_library("seven", progress=quiet).seven() == 7


def test_without_a_compiler_there_is_no_library(home, monkeypatch):
    monkeypatch.setenv("PATH", "")

    with pytest.raises(NoLibraryError, match="there is no C"):
        load_library("seven", progress=quiet)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("exit 1", "failed"),
        ("sleep 60", "took longer than 0.1 s"),
        # -o FILE SOURCE are the last three arguments.
        ('while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"', "cannot be loaded"),
        ("exit 0", "could not be run"),
    ],
)
def test_a_compiler_that_does_not_do_its_work_leaves_nothing(
    home, compiler, monkeypatch, body, reason
):
    monkeypatch.setattr(native, "BUILD_TIMEOUT_S", 0.1 if "sleep" in body else 60)
    compiler(body)

    with pytest.raises(NoLibraryError, match=reason):
        load_library("seven", progress=quiet)

    assert not list(home.glob("build-*"))


def test_a_compiler_that_is_not_there_is_told(home, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++ -m64")

    with pytest.raises(NoLibraryError, match=r"/nowhere/c\+\+ could not be run"):
        load_library("seven", progress=quiet)


def test_our_sources_are_beside_the_module():
    assert [path.name for path in native.SOURCES.iterdir()] == ["int8_linear.cpp"]
