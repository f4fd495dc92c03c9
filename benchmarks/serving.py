"""Servers as processes, seen from outside: start, stop, memory, files, send queues, metrics. Linux.

What the benchmarks share. It reads ``/proc`` and raw
sockets, so that it costs the server next to nothing and the measuring process little.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Loading and, for some, compiling a model on a busy machine.
START_TIMEOUT_S = 900.0
_LISTEN = "0A"
_SAMPLE = re.compile(r"^(\w+)(?:\{[^}]*\})? ([0-9.e+-]+)$", re.MULTILINE)


class DidNotStartError(Exception):
    """A server ended or stayed silent; the message has its last lines."""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def triolet_command() -> str:
    """The ``triolet`` beside this interpreter."""
    return str(Path(sys.executable).parent / "triolet")


def raise_file_limit() -> None:
    """Let this process and its children open as many files as the system lets them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def launched(
    command: Sequence[str],
    *,
    log: Path,
    environ: dict[str, str] | None = None,
    patience_s: float = 10.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, none of which is left afterwards.

    Args:
        command: What to run.
        log: Where its output goes.
        environ: Beside what this process has.
        patience_s: From SIGTERM to SIGKILL.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environ or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        stop(process, patience_s)


@contextmanager
def server(
    command: Sequence[str],
    port: int,
    *,
    log: Path,
    environ: dict[str, str] | None = None,
    ready: str = "/ready",
) -> Iterator[subprocess.Popen[bytes]]:
    """A launched server that answers ``GET`` of the path ``ready``.

    Raises:
        DidNotStartError: It did not get so far.
    """
    with launched(command, log=log, environ=environ) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while get(port, ready, timeout_s=5.0)[0] != 200:
            if process.poll() is not None or time.monotonic() > deadline:
                raise DidNotStartError(log.read_text(errors="replace")[-2000:])
            time.sleep(0.2)
        yield process


def stop(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """SIGTERM, and after a while SIGKILL for the whole group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def get(port: int, path: str, *, timeout_s: float = 30.0) -> tuple[int, str]:
    """Status and body of a GET; status 0 where nobody answers."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout_s) as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            said = b"".join(iter(lambda: sock.recv(65_536), b""))
    except OSError:
        return 0, ""
    head, _, body = said.partition(b"\r\n\r\n")
    return (int(head.split(b" ", 2)[1]) if head else 0), body.decode(errors="replace")


def metrics(port: int) -> dict[str, float]:
    """What ``GET /metrics`` says; see :func:`parse_metrics`."""
    return parse_metrics(get(port, "/metrics")[1])


def parse_metrics(text: str) -> dict[str, float]:
    """Metrics by name; series that differ only in labels are added up."""
    found: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def process_tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue  # gone in between
        children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def rss_bytes(pid: int) -> int:
    """Resident memory of one process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def open_files(pid: int) -> int:
    """File descriptors of one process."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def send_queues(port: int) -> dict[int, int]:
    """By the client's port, the bytes that the kernel holds for it on the server's side."""
    queues = {}
    with Path("/proc/net/tcp").open() as table:
        next(table)
        for line in table:
            _, local, remote, state, queue, *_ = line.split()
            if int(local[9:], 16) == port and state != _LISTEN:
                queues[int(remote[9:], 16)] = int(queue[:8], 16)
    return queues
