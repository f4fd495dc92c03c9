"""What 500 clients that stop reading cost a server, and those that read beside them.

On the scripted engine, in three runs of a server::

    python benchmarks/stuck/run.py

1. *Beside*: healthy streams alone, then beside the stuck ones, in turns. Memory, and the gaps
   between the events of the healthy.
2. *Gone*: with a short send timeout, from the last byte that the kernel took for a stuck client
   until that client sees its connection end.
3. *Drain*: SIGTERM while they fill up, and when all are stuck; until the process is gone.

A stuck client has a receive window of 2 KiB, asks for logprobs, so that an event has some
kilobytes, and reads nothing. Its stream fills the kernel's buffers, then its bound, then pauses.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

# The scripts of this folder share a module with their neighbours.
sys.path.insert(1, str(Path(__file__).parent.parent))

import attrs
from clients import LONG

from serving import (
    free_port,
    metrics,
    raise_file_limit,
    rss_bytes,
    send_queues,
    server,
    triolet_command,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KIB = 1024
#: What a stuck client may cost beside its bound.
ALLOWED_KIB = 64
#: How much longer than without stuck clients a gap may be.
ALLOWED_RATIO = 1.2
#: What leaving may take beside its timeout.
ALLOWED_LATE_S = 2.0
#: Seconds between two looks at the server.
LOOK_S = 0.2
#: A send queue that has not changed for this long is stuck.
STILL_S = 1.0
#: Longest wait for all clients to be stuck, or gone.
PATIENCE_S = 180.0
#: A send timeout that ends nobody while something else is measured.
LATE_S = 600.0


class Clients:
    """A process of clients; see ``clients.py``."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "clients.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        #: What it said when all its streams were open.
        self.opened = self._hear()

    def _hear(self) -> object:
        line = self.process.stdout.readline()
        if not line:
            sys.exit("the clients failed")
        return json.loads(line)

    def ask(self) -> object:
        """What it has to tell."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._hear()

    def close(self) -> None:
        """Close all its streams."""
        self.process.stdin.close()
        self.process.wait(30)


@attrs.define(eq=False)
class Run:
    """A server and its clients."""

    options: argparse.Namespace
    port: int
    process: subprocess.Popen[bytes]
    healthy: Clients
    stuck: Clients | None = None
    peak_bytes: int = 0

    def gaps_s(self, seconds: float) -> list[float]:
        """The gaps of the healthy streams in a window from now."""
        self.healthy.ask()
        self.look_for(seconds)
        return self.healthy.ask()

    def look(self) -> None:
        """Note the memory."""
        self.peak_bytes = max(self.peak_bytes, rss_bytes(self.process.pid))

    def look_for(self, seconds: float) -> None:
        """Note the memory again and again."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.look()
            time.sleep(LOOK_S)

    def open_stuck(self) -> None:
        """All of them connect and send their request."""
        fields = json.dumps(
            {"logprobs": True, "top_logprobs": self.options.logprobs}
            if self.options.logprobs
            else {}
        )
        self.stuck = Clients("stuck", str(self.port), str(self.options.stuck), fields)

    def close_stuck(self) -> None:
        """All of them leave, and the server forgets them."""
        self.stuck.close()
        self.wait_until(lambda: self.told("triolet_requests_live") <= self.options.healthy)

    def wait_until_stuck(self) -> None:
        """Until the kernel takes nothing more for any of them, and the engine has paused them.

        Plain text is so small that no stream of it reaches its bound in good time: those are
        not paused.
        """
        ports = list(self.stuck.opened)
        queues: dict[int, int] = {}

        def stand_still() -> bool:
            nonlocal queues
            paused = self.told("triolet_engine_sequences_paused") if self.options.logprobs else inf
            if paused < self.options.stuck:
                return False
            before, queues = queues, send_queues(self.port)
            self.look_for(STILL_S)
            return all(0 < queues.get(port, 0) == before.get(port) for port in ports)

        self.wait_until(stand_still)

    def told(self, name: str) -> float:
        """One of the server's metrics."""
        return metrics(self.port)[name]

    def wait_until(self, true: Callable[[], bool]) -> None:
        """Look until it is so, or patience is over."""
        end = time.monotonic() + PATIENCE_S
        while not true():
            if time.monotonic() > end:
                sys.exit("the server did not get there in time; see --help for smaller sizes")
            self.look_for(LOOK_S)


@contextmanager
def running(options: argparse.Namespace, send_timeout_s: float) -> Iterator[Run]:
    """A server with its healthy streams."""
    port, streams = free_port(), options.stuck + options.healthy
    command = [
        *(options.triolet or triolet_command(), "serve", "--engine", "scripted"),
        *("--scripted-step-ms", str(options.step_ms), "--scripted-text", "a" * LONG),
        *("--max-model-len", str(2 * LONG), "--max-num-seqs", str(streams)),
        *("--max-num-queued-reqs", str(streams), "--max-connections", str(streams + 50)),
        *("--max-stream-buffer", str(options.bound_kib * KIB)),
        *("--send-timeout", str(send_timeout_s), "--drain-timeout", str(options.drain_timeout)),
        *("--port", str(port), "--no-access-log", "--log-level", "error"),
    ]
    with (
        tempfile.TemporaryDirectory() as scratch,
        server(command, port, log=Path(scratch) / "log") as process,
    ):
        healthy = Clients("healthy", str(port), str(options.healthy))
        run = Run(options, port, process, healthy)
        try:
            yield run
        finally:
            for clients in (run.healthy, run.stuck):
                if clients is not None and clients.process.poll() is None:
                    clients.close()


def percentile(values: list[float], share: float) -> float:
    """The value that ``share`` of all are below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def beside(options: argparse.Namespace) -> dict[str, object]:
    """Healthy streams alone and beside the stuck, in turns; memory."""
    rounds = []
    with running(options, LATE_S) as run:
        run.look_for(1.0)
        for _ in range(options.rounds):
            alone = run.gaps_s(options.window)
            before = rss_bytes(run.process.pid)
            run.peak_bytes = before
            run.healthy.ask()
            began = time.monotonic()
            run.open_stuck()
            run.wait_until_stuck()
            fill_s = time.monotonic() - began
            filling = run.healthy.ask()
            stuck = run.gaps_s(options.window)
            rounds.append({
                "fill_s": fill_s,
                "rss_before": before,
                "rss_peak": run.peak_bytes,
                "kib_per_client": (run.peak_bytes - before) / options.stuck / KIB,
                "gaps_s": {
                    name: {
                        "p50": percentile(gaps, 0.5),
                        "p99": percentile(gaps, 0.99),
                        "max": max(gaps),
                    }
                    for name, gaps in (("alone", alone), ("filling", filling), ("beside", stuck))
                },
            })
            print(f"beside: {rounds[-1]}", flush=True)
            run.close_stuck()
            run.look_for(1.0)
        after = rss_bytes(run.process.pid)
    p99 = {
        name: statistics.median(one["gaps_s"][name]["p99"] for one in rounds)
        for name in ("alone", "filling", "beside")
    }
    return {
        "rounds": rounds,
        "rss_after": after,
        "kib_per_client": max(one["kib_per_client"] for one in rounds),
        "p99_s": p99,
        "ratio": p99["beside"] / p99["alone"],
    }


def gone(options: argparse.Namespace) -> dict[str, object]:
    """From the last byte that was taken for a client until its end, with a short send timeout."""
    progress: dict[int, tuple[int, float]] = {}
    with running(options, options.send_timeout) as run:
        run.open_stuck()
        end = time.monotonic() + PATIENCE_S
        ended: dict[str, float] = {}
        while len(ended) < options.stuck and time.monotonic() < end:
            now = time.monotonic()
            for port, queue in send_queues(run.port).items():
                if progress.get(port, (-1, 0.0))[0] != queue:
                    progress[port] = (queue, now)
            ended = run.stuck.ask()
            time.sleep(LOOK_S)
        left = run.told("triolet_requests_live") - options.healthy
    late = [when - progress[int(port)][1] for port, when in ended.items() if int(port) in progress]
    print(f"gone: {len(ended)} of {options.stuck}, the last after {max(late, default=0):.2f} s")
    return {
        "gone": len(ended),
        "live_requests_left": left,
        "median_s": statistics.median(late) if late else None,
        "last_s": max(late, default=None),
    }


def drain(options: argparse.Namespace, *, stuck: bool) -> dict[str, object]:
    """From SIGTERM to the end of the process."""
    with running(options, LATE_S) as run:
        run.open_stuck()
        if stuck:
            run.wait_until_stuck()
        else:
            run.look_for(1.0)
        began = time.monotonic()
        cpu_s = process_cpu_s(run.process.pid) + children_cpu_s()
        run.process.send_signal(signal.SIGTERM)
        try:
            code = run.process.wait(options.drain_timeout + 60)
        except subprocess.TimeoutExpired:
            code = None
        took = time.monotonic() - began
        # The server is the one child that was waited for in between.
        cpu_s = children_cpu_s() - cpu_s
    name = "stuck" if stuck else "filling"
    print(f"drain, {name}: {took:.2f} s ({cpu_s:.2f} CPU s), exit code {code}", flush=True)
    return {"seconds": took, "cpu_s": cpu_s, "exit_code": code}


def process_cpu_s(pid: int) -> float:
    """Processor seconds of a process, as ``clock_getcpuclockid(3)`` finds them."""
    return time.clock_gettime((~pid << 3) | 2)


def children_cpu_s() -> float:
    """Processor seconds of all children that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def lines(options: argparse.Namespace, found: dict[str, dict[str, object]]) -> Iterator[str]:
    """The table, in markdown."""
    yield "| | measured | allowed | |"
    yield "|---|---|---|---|"
    rows: list[tuple[str, float, float, str]] = []
    if "beside" in found:
        one = found["beside"]
        room = options.bound_kib + ALLOWED_KIB
        rows += [
            ("memory per stuck client", one["kib_per_client"], room, "KiB"),
            ("gap p99 beside / alone", one["ratio"], ALLOWED_RATIO, ""),
        ]
    if "gone" in found:
        late = found["gone"]["last_s"] if found["gone"]["gone"] == options.stuck else None
        allowed = options.send_timeout + ALLOWED_LATE_S
        rows.append(("last stuck client gone", late or float("inf"), allowed, "s"))
    for name in ("filling", "stuck"):
        if f"drain, {name}" in found:
            took = found[f"drain, {name}"]["seconds"]
            allowed = options.drain_timeout + ALLOWED_LATE_S
            rows.append((f"SIGTERM to exit, {name}", took, allowed, "s"))
    for name, value, allowed, unit in rows:
        verdict = "yes" if value <= allowed else "NO"
        yield f"| {name} | {value:.2f} {unit} | {allowed:g} {unit} | {verdict} |"
    if "beside" in found:
        p99 = found["beside"]["p99_s"]
        said = ", ".join(f"{name} {1000 * value:.1f}" for name, value in p99.items())
        yield f"\nGap p99 of {options.healthy} healthy streams, ms: {said}."


def main() -> None:
    """Measure, print a table and write it down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--triolet", help="its command; default: the one beside this Python")
    add("--stuck", type=int, default=500, help="clients that do not read")
    add("--healthy", type=int, default=16)
    add("--rounds", type=int, default=3)
    add("--window", type=float, default=10.0, help="seconds of each look at the healthy streams")
    add("--step-ms", type=float, default=20.0, help="of the scripted engine")
    add("--logprobs", type=int, default=20, help="per token of a stuck stream; 0 for none")
    add("--bound-kib", type=int, default=256, help="--max-stream-buffer")
    add("--send-timeout", type=float, default=5.0)
    add("--drain-timeout", type=float, default=5.0)
    add("--only", nargs="+", choices=["beside", "gone", "drain"])
    add("--json", type=Path, help="write everything here")
    options = parser.parse_args()
    raise_file_limit()
    wanted = options.only or ["beside", "gone", "drain"]
    found: dict[str, dict[str, object]] = {}
    if "beside" in wanted:
        found["beside"] = beside(options)
    if "gone" in wanted:
        found["gone"] = gone(options)
    if "drain" in wanted:
        found["drain, filling"] = drain(options, stuck=False)
        found["drain, stuck"] = drain(options, stuck=True)
    print(f"\n{time.strftime('%Y-%m-%d')}, {options.stuck} stuck clients\n")
    print("\n".join(lines(options, found)))
    if options.json:
        options.json.write_text(json.dumps({"arguments": sys.argv[1:], **found}, indent=1))


if __name__ == "__main__":
    main()
