"""Tokens per second of N concurrent streams: Triolet beside ``transformers serve``.

Run it through nox, which makes both environments::

    nox -s bench -- --streams 8 --tokens 128 --rounds 3

The servers run one at a time, in turn, round after round, so that whatever the machine does
besides falls on both. Every stream sends the same kind of prompt, greedy, and counts the
chunks with text that it gets and when; all of a round's streams start together.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import attrs
import httpx2
import trio

from serving import free_port, launched

#: Prompts of about 64 tokens that a small model answers at length.
PROMPTS = [
    f"Write a long and detailed story about {subject}. Begin with how it started, go on with "
    "what everybody thought of it at the time, describe the three most surprising events one "
    "after the other, and do not come to an end before you have told what became of everyone."
    for subject in (
        "a lighthouse", "a clockmaker", "two rivers", "a lost letter", "the first orchard",
        "a mountain village", "an old violin", "a school for birds",
    )
]  # fmt: skip
#: Loading a model on a busy machine.
START_TIMEOUT_S = 600.0
#: To an orderly stop; then it is killed.
STOP_PATIENCE_S = 20.0


@attrs.frozen
class Stream:
    """What one client saw. Seconds since the round began."""

    arrivals: tuple[float, ...]
    finish_reason: str | None


@attrs.frozen
class Round:
    """One round of all streams on one server."""

    tokens_per_s: float
    first_token_s: float
    gap_p50_s: float
    gap_max_s: float
    tokens: int


async def wait_until_it_answers(client: httpx2.AsyncClient, body: dict[str, object]) -> None:
    """One whole answer: the model is loaded and warm."""
    with trio.fail_after(START_TIMEOUT_S):
        while True:
            try:
                response = await client.post(
                    "/v1/chat/completions", json={**body, "stream": False, "max_tokens": 2}
                )
            except httpx2.TransportError:
                await trio.sleep(0.5)
                continue
            if response.status_code == httpx2.codes.OK:
                return
            await trio.sleep(0.5)


async def stream(client: httpx2.AsyncClient, body: dict[str, object], into: list[Stream]) -> None:
    """Read one stream and note when each chunk with text came."""
    arrivals: list[float] = []
    finish = None
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:]).get("choices", ()):
                finish = choice.get("finish_reason") or finish
                if choice["delta"].get("content"):
                    arrivals.append(trio.current_time())
    into.append(Stream(tuple(arrivals), finish))


async def measure(base_url: str, model: str, streams: int, tokens: int) -> Round:
    """Run one round."""
    limits = httpx2.Limits(max_connections=streams)
    async with httpx2.AsyncClient(
        base_url=base_url, timeout=START_TIMEOUT_S, limits=limits
    ) as client:
        bodies = [
            {
                "model": model,
                "messages": [{"role": "user", "content": PROMPTS[i % len(PROMPTS)]}],
                "max_tokens": tokens,
                "temperature": 0,
                "stream": True,
            }
            for i in range(streams)
        ]
        await wait_until_it_answers(client, bodies[0])
        seen: list[Stream] = []
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for body in bodies:
                nursery.start_soon(stream, client, body, seen)
        took = trio.current_time() - started
    total = sum(len(one.arrivals) for one in seen)
    gaps = [b - a for one in seen for a, b in zip(one.arrivals, one.arrivals[1:], strict=False)]
    return Round(
        tokens_per_s=total / took,
        first_token_s=statistics.median(one.arrivals[0] for one in seen) - started,
        gap_p50_s=statistics.median(gaps),
        gap_max_s=max(gaps),
        tokens=total,
    )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both servers")
    parser.add_argument(
        "--peer", type=Path, required=True, help="bin folder of transformers[serving]"
    )
    parser.add_argument("--json", type=Path, help="write all rounds here")
    options = parser.parse_args()
    results: dict[str, list[Round]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "SmolLM2-135M-Instruct"
        here = Path(__file__).parent
        subprocess.run([sys.executable, here / "packaged_model.py", folder], check=True)
        threads = str(options.threads)
        for number in range(options.rounds):
            for name, command in commands(options, folder).items():
                port = free_port()
                environ = {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
                with launched(
                    [*command, "--port", str(port)],
                    log=Path(os.devnull),
                    environ=environ,
                    patience_s=STOP_PATIENCE_S,
                ):
                    result = trio.run(
                        partial(
                            measure,
                            f"http://127.0.0.1:{port}",
                            str(folder),
                            options.streams,
                            options.tokens,
                        )
                    )
                results.setdefault(name, []).append(result)
                print(f"round {number + 1}  {name:24} {result}", flush=True)
    report(results)
    if options.json:
        rounds = {name: [attrs.asdict(one) for one in ran] for name, ran in results.items()}
        options.json.write_text(json.dumps({"command": sys.argv, "rounds": rounds}, indent=1))


def commands(options: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """The servers to compare, by name."""
    bin_folder = Path(sys.executable).parent
    return {
        "triolet": [
            *(str(bin_folder / "triolet"), "serve", str(folder), "--dtype", "float32"),
            *("--threads", str(options.threads), "--max-num-seqs", str(options.streams)),
        ],
        "transformers serve": [
            *(str(options.peer / "transformers"), "serve", str(folder), "--host", "127.0.0.1"),
            *("--continuous-batching", "--device", "cpu", "--dtype", "float32"),
        ],
    }


def report(results: dict[str, list[Round]]) -> None:
    """Medians of all rounds, and the ratio to Triolet."""
    print(
        f"\n{'median of rounds':24} {'tok/s':>8} {'TTFT s':>8} {'gap p50 s':>10} {'gap max s':>10}"
    )
    rates = {}
    for name, rounds in results.items():
        middle = {
            field: statistics.median(getattr(one, field) for one in rounds)
            for field in ("tokens_per_s", "first_token_s", "gap_p50_s", "gap_max_s")
        }
        rates[name] = middle["tokens_per_s"]
        print(
            f"{name:24} {middle['tokens_per_s']:8.1f} {middle['first_token_s']:8.2f} "
            f"{middle['gap_p50_s']:10.3f} {middle['gap_max_s']:10.3f}"
        )
    for name, rate in rates.items():
        if name != "triolet":
            print(f"triolet / {name}: {rates['triolet'] / rate:.2f}")


if __name__ == "__main__":
    main()
