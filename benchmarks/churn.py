"""10,000 clients that connect, read a part and leave: what stays behind in the server.

On the scripted engine; memory, file descriptors, KV blocks, requests and tasks before, on the way
and after::

    python benchmarks/churn.py

A client sends a request for a stream, reads up to 2,000 bytes (some read nothing) and leaves: a
third with a reset, the others with a plain close. The tasks are counted in the server by a Trio
instrument: the script runs ``triolet`` in a process of its own that answers on its stdin.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from serving import free_port, metrics, open_files, raise_file_limit, rss_bytes, server

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Tokens of an answer: more than any client reads.
LONG = 4000
#: Bytes that a client reads at most.
MOST_READ = 2000
#: Of so many clients, one leaves with a reset.
RESETS = 3
#: l_onoff = 1, l_linger = 0: closing sends a reset.
_LINGER_RESET = struct.pack("ii", 1, 0)
#: Longest wait for the server to be rid of the last client.
PATIENCE_S = 60.0


@attrs.frozen
class Held:
    """What the server holds at one moment."""

    clients: int
    rss_kib: float
    files: int
    blocks: float
    requests: float
    tasks: int


def serve(tasks: Path, arguments: list[str]) -> None:
    """Be ``triolet``, and keep the number of living tasks in the file ``tasks``."""
    import trio  # noqa: PLC0415 - only in the server

    from triolet.cli.main import main as triolet  # noqa: PLC0415 - as above

    class Counter(trio.abc.Instrument):
        living = 0

        def task_spawned(self, _: trio.lowlevel.Task) -> None:
            self.living += 1

        def task_exited(self, _: trio.lowlevel.Task) -> None:
            self.living -= 1

    counter = Counter()
    run = trio.run

    def counted_run(*args: object, **kwargs: object) -> object:
        return run(*args, instruments=[counter], **kwargs)

    def write() -> None:
        fresh = tasks.with_suffix(".new")
        while True:
            fresh.write_text(str(counter.living))
            # At once, for who reads it in between.
            fresh.replace(tasks)
            time.sleep(0.2)

    trio.run = counted_run
    threading.Thread(target=write, daemon=True).start()
    triolet(arguments)


def request() -> bytes:
    """What each client sends."""
    body = json.dumps({
        "model": "scripted",
        "messages": [{"role": "user", "content": "Go on."}],
        "max_tokens": LONG,
        "stream": True,
    }).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d"
    return head % len(body) + b"\r\nContent-Type: application/json\r\n\r\n" + body


def come_and_go(port: int, number: int, seed: int) -> None:
    """So many clients, one after the other."""
    chance, payload = random.Random(seed), request()
    for _ in range(number):
        wanted = chance.randrange(MOST_READ)
        with socket.create_connection(("127.0.0.1", port), 60.0) as sock:
            if chance.randrange(RESETS) == 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
            sock.sendall(payload)
            # One in eight is gone before the server has read its request.
            while wanted > MOST_READ / 8:
                data = sock.recv(wanted)
                if not data:
                    raise SystemExit("the server ended a stream")
                wanted -= len(data)


def clients(port: int, number: int, at_once: int, seed: int) -> None:
    """So many clients, some at the same time, in a process of their own."""
    run = [sys.executable, __file__, "--clients", str(port), str(number // at_once)]
    processes = [subprocess.Popen([*run, str(seed * at_once + i)]) for i in range(at_once)]
    if any(process.wait() for process in processes):
        sys.exit("the clients failed")


def held(port: int, pid: int, tasks: Path, count: int) -> Held:
    """What the server holds once it is rid of all clients, or patience is over."""
    end = time.monotonic() + PATIENCE_S
    while True:
        time.sleep(0.5)
        told = metrics(port)
        live, blocks = told["triolet_requests_live"], told["triolet_engine_kv_blocks_used"]
        if (live, blocks) == (0, 0) or time.monotonic() > end:
            break
    # The connection of the look at the metrics has to end too.
    time.sleep(1.0)
    return Held(count, rss_bytes(pid) / 1024, open_files(pid), blocks, live, int(tasks.read_text()))


def measure(options: argparse.Namespace) -> Iterator[Held | float]:
    """What is held after each tenth; last, the clients per second."""
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        command = [
            *(sys.executable, __file__, "--serve", str(scratch / "tasks")),
            *("serve", "--engine", "scripted", "--scripted-text", "a" * LONG),
            *("--scripted-step-ms", "1", "--max-model-len", str(2 * LONG), "--port", str(port)),
            *("--no-access-log", "--log-level", "error", "--drain-timeout", "0"),
        ]
        with server(command, port, log=scratch / "log") as process:
            look = (port, process.pid, scratch / "tasks")
            yield held(*look, 0)
            took = 0.0
            for part in range(1, 11):
                began = time.monotonic()
                clients(port, options.clients_in_all // 10, options.at_once, part)
                took += time.monotonic() - began
                yield held(*look, part * options.clients_in_all // 10)
            yield options.clients_in_all / took


def main() -> None:
    """Measure and print a table."""
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), sys.argv[3:])
        return
    if sys.argv[1:2] == ["--clients"]:
        come_and_go(*map(int, sys.argv[2:5]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--total", dest="clients_in_all", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write everything here")
    options = parser.parse_args()
    raise_file_limit()
    print("| after | RSS, KiB | fds | KV blocks | requests | tasks |\n|---|---|---|---|---|---|")
    *looks, rate = [show(one) for one in measure(options)]
    first, tenth, last = looks[0], looks[1], looks[-1]
    growth = (last.rss_kib - tenth.rss_kib) / (last.clients - tenth.clients) * 1024
    print(f"\n{time.strftime('%Y-%m-%d')}, {rate:.0f} clients/s, {options.at_once} at once;")
    print(f"{growth:.0f} bytes per client from the first tenth to the end.")
    same = all(
        getattr(first, name) == getattr(last, name)
        for name in ("files", "blocks", "requests", "tasks")
    )
    print(f"fds, blocks, requests and tasks as at the start: {'yes' if same else 'NO'}")
    if options.json:
        looks = [attrs.asdict(one) for one in looks]
        options.json.write_text(json.dumps({"looks": looks, "clients_per_s": rate}, indent=1))


def show(one: Held | float) -> Held | float:
    """Print a line of the table as soon as it is there."""
    if isinstance(one, Held):
        print(
            f"| {one.clients} | {one.rss_kib:.0f} | {one.files} | {one.blocks:.0f} "
            f"| {one.requests:.0f} | {one.tasks} |",
            flush=True,
        )
    return one


if __name__ == "__main__":
    main()
