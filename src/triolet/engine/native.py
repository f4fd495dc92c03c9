"""Compiles C++ of ours on the machine that runs it, once, and loads it.

Rules
    1. Nothing needs a compiler: whoever asks for a library handles :exc:`NoLibraryError`.
    2. What was compiled is kept in the user's cache, named by a hash of all that it depends on:
       the source, the flags, the processor's features, the release of torch. So a file of that
       name never has to change, and several processes may start at once: each writes a file of
       its own and renames it to the common name.
    3. Code is loaded from no file that another user could have written. Where the cache cannot
       be written or trusted, the library is built in a private folder and kept for this process.

The library has C functions alone, called through ctypes, which lets go of Python's lock for each
call. It includes no header of torch: that keeps the build at a second, and no release of torch can
break it. It shares torch's team of OpenMP threads, since a process has one libgomp.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

#: Where our sources are, in a wheel too.
SOURCES: Final = Path(__file__).parent / "kernels"
#: For this very processor; without a licence to change what floating-point numbers come out.
FLAGS: Final = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fopenmp",
    "-fPIC",
    "-shared",
    # gcc 12 warns of its own headers.
    "-w",
)
COMPILERS: Final = ("c++", "g++", "clang++")
#: A busy machine takes twenty times the second that a quiet one needs.
BUILD_TIMEOUT_S: Final = 120.0


class NoLibraryError(Exception):
    """A library of ours cannot be had on this machine; the text says why."""


def load_library(name: str, *, progress: Callable[[str], None]) -> ctypes.CDLL:
    """Load the library of ``kernels/<name>.cpp``, compiled now if it has not been before.

    Args:
        name: The source's name without its suffix.
        progress: Called with a line of text before a compiler starts.

    Raises:
        NoLibraryError: There is no compiler, it failed, or its result cannot be loaded.
    """
    source = SOURCES / f"{name}.cpp"
    folder = _cache_folder()
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="triolet-") as private:
            # It stays in memory when the folder goes.
            return _open(_build(source, Path(private) / f"{name}.so", progress))
    path = folder / f"{name}-{_fingerprint(source)}.so"
    if _only_ours(path):
        try:
            return _open(path)
        except NoLibraryError as error:
            logger.debug("building it anew: %s", error)
    return _open(_build(source, path, progress))


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoLibraryError("what the C++ compiler built cannot be loaded") from error


def _build(source: Path, target: Path, progress: Callable[[str], None]) -> Path:
    compiler = _compiler()
    progress(f"Compiling {source.name} for this processor")
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
            built, said = Path(folder) / target.name, Path(folder) / "said"
            # A file, not a pipe: what a compiler starts itself would hold that open after its end.
            with said.open("wb") as output:
                done = subprocess.run(  # noqa: S603 - the user's compiler, our arguments
                    [*compiler, *FLAGS, "-o", str(built), str(source)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=BUILD_TIMEOUT_S,
                    check=False,
                )
            if done.returncode != 0:
                logger.debug("the compiler said:\n%s", said.read_text(errors="replace"))
                raise NoLibraryError(f"the C++ compiler {compiler[0]} failed")
            # A linker makes it as the umask has it, and rule 3 wants it ours alone.
            built.chmod(stat.S_IRWXU)
            built.replace(target)
    except subprocess.TimeoutExpired as error:
        raise NoLibraryError(
            f"the C++ compiler {compiler[0]} took longer than {BUILD_TIMEOUT_S:g} s"
        ) from error
    except OSError as error:
        raise NoLibraryError(f"the C++ compiler {compiler[0]} could not be run") from error
    return target


def _compiler() -> list[str]:
    """The command, with arguments where ``CXX`` has some."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        return named
    for name in COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return [found]
    raise NoLibraryError("there is no C++ compiler")


def _fingerprint(source: Path) -> str:
    parts = (source.read_text(encoding="utf-8"), *FLAGS, _processor(), torch.__version__)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    """Name and features of the processor, as far as the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    # x86 says flags, Arm says Features.
    features = (line for line in lines if line.lower().startswith(("flags", "features")))
    return f"{platform.machine()} {next(features, platform.processor())}"


def _cache_folder() -> Path | None:
    """A folder that is there and that nobody else can write to, or None."""
    # The XDG base directory specification: a relative path is to be ignored.
    stated = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        home = stated if stated.is_absolute() else Path.home() / ".cache"
        named = home / "triolet" / "kernels"
        named.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        # Where links lead now: systemd's cache folders are links, and others may change theirs.
        folder = named.resolve()
    except (OSError, RuntimeError):
        # RuntimeError: a user without a home.
        return None
    trusted = _only_ours(folder.parent) and _only_ours(folder) and os.access(folder, os.W_OK)
    return folder if trusted else None


def _only_ours(path: Path) -> bool:
    """Whether it exists, belongs to this user, and no other user may write it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return (
        found.st_uid == os.geteuid()
        and not stat.S_ISLNK(found.st_mode)
        and (not found.st_mode & others)
    )
