"""Tokens per second through the whole server, over the scripted engine, by number of streams.

The engine's part is next to nothing (each token is one byte of a text), so what is measured is
all the rest: scheduler, output path, HTTP, sockets. The server runs in a process of its own; the
client reads raw sockets and looks at the bytes afterwards::

    python benchmarks/output_path/streams.py

What is counted lies between two moments: all streams have begun, and ``--seconds`` later or when
the first of them ends. Client and server share the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import selectors
import socket
import statistics
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(1, str(Path(__file__).parent.parent))

from serving import free_port, launched

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Bytes of output of one stream: more than it gets to say.
LONG = 60_000
#: Tokens for the prompt, which has fewer.
PROMPT_ROOM = 100
#: Most seconds for the server to start, or for all streams to begin.
PATIENCE_S = 60.0
#: To an orderly stop; then it is killed.
STOP_PATIENCE_S = 20.0
CONTENT = re.compile(rb'"content":"(\w*)"')


class Measured(NamedTuple):
    """What the client saw in its window; rates are per second."""

    tokens: float
    events: float
    #: Tokens per second of the server's processor time: what a busy machine changes least.
    tokens_per_cpu_s: float
    megabytes: float
    #: Seconds until all streams had begun.
    begin_s: float
    window_s: float
    #: Shares of one core.
    client_cpu: float
    server_cpu: float


@contextmanager
def server(streams: int) -> Iterator[tuple[int, int]]:
    """A server for so many streams: its port and process id."""
    port = free_port()
    command = [
        *(Path(sys.executable).parent / "triolet", "serve", "--engine", "scripted"),
        *("--scripted-step-ms", "0", "--scripted-text", "a" * LONG),
        *("--max-model-len", str(2 * LONG), "--max-num-seqs", str(streams)),
        *("--max-num-queued-reqs", str(streams), "--max-connections", str(streams + 10)),
        # Room for all prompts in a step, or most of the run is about who begins when.
        *("--max-num-batched-tokens", str(streams * PROMPT_ROOM)),
        *("--port", str(port), "--no-access-log", "--log-level", "error"),
        *("--drain-timeout", "0"),
    ]
    with launched(command, log=Path(os.devnull), patience_s=STOP_PATIENCE_S) as process:
        deadline = time.monotonic() + PATIENCE_S
        while not answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit("the server did not start")
            time.sleep(0.1)
        yield port, process.pid


def answers(port: int) -> bool:
    """Whether the server takes connections."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def server_cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def connect(port: int) -> socket.socket:
    """A connection on which the server has answered once, so that it has accepted it."""
    stream = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
    stream.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert stream.recv(65_536).startswith(b"HTTP/1.1 200")
    return stream


def request() -> bytes:
    """What each client sends."""
    body = json.dumps({
        "model": "scripted",
        "messages": [{"role": "user", "content": "Go on."}],
        "max_tokens": LONG,
        "stream": True,
    }).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def measure(port: int, pid: int, streams: int, seconds: float) -> Measured:
    """Open all streams, and count what they say in a window."""
    sockets = [connect(port) for _ in range(streams)]
    began = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for stream in sockets:
            stream.sendall(request())
            stream.setblocking(False)  # noqa: FBT003 - positional only
            selector.register(stream, selectors.EVENT_READ, [])
        heard: set[int] = set()
        while len(heard) < streams:
            if time.perf_counter() - began > PATIENCE_S:
                sys.exit(f"only {len(heard)} of {streams} streams began")
            heard.update(number for number, parts in receive(selector) if b"data:" in parts[-1])
        for key in selector.get_map().values():
            key.data.clear()
        start, client, serving = time.perf_counter(), time.process_time(), server_cpu_s(pid)
        begin_s = start - began
        ended = False
        while not ended and time.perf_counter() - start < seconds:
            ended = any(not parts[-1] for _, parts in receive(selector))
        took = time.perf_counter() - start
        client, serving = time.process_time() - client, server_cpu_s(pid) - serving
        said = [b"".join(key.data) for key in selector.get_map().values()]
    for stream in sockets:
        stream.close()
    tokens = sum(len(text) for one in said for text in CONTENT.findall(one))
    return Measured(
        tokens=tokens / took,
        events=sum(one.count(b"data: ") for one in said) / took,
        tokens_per_cpu_s=tokens / serving,
        megabytes=sum(map(len, said)) / took / 1e6,
        begin_s=begin_s,
        window_s=took,
        client_cpu=client / took,
        server_cpu=serving / took,
    )


def receive(selector: selectors.BaseSelector) -> Iterator[tuple[int, list[bytes]]]:
    """Read what there is; the file number of each that got some, and all its parts so far."""
    for key, _ in selector.select(1.0):
        assert isinstance(key.fileobj, socket.socket)
        key.data.append(key.fileobj.recv(65_536))
        yield key.fd, key.data


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256, 1000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"{'streams':8}{'tokens/s':>14}{'events/s':>14}{'tokens/server CPU s':>22}", end="")
    print(f"{'MB/s':>7}{'begin s':>9}{'client':>8}{'server':>8}")
    for streams in options.streams:
        ran = []
        for _ in range(options.rounds):
            with server(streams) as (port, pid):
                ran.append(measure(port, pid, streams, options.seconds))
        report(streams, ran)


def report(streams: int, ran: list[Measured]) -> None:
    """One line of the table: medians, and the least of all rounds."""
    middle = Measured(*(statistics.median(column) for column in zip(*ran, strict=True)))
    rates = [
        f"{getattr(middle, name):.0f} ({min(getattr(one, name) for one in ran):.0f})"
        for name in ("tokens", "events", "tokens_per_cpu_s")
    ]
    print(
        f"{streams:<8}{rates[0]:>14}{rates[1]:>14}{rates[2]:>22}{middle.megabytes:7.2f}{middle.begin_s:9.2f}"
        f"{middle.client_cpu:8.0%}{middle.server_cpu:8.0%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
