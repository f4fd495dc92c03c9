"""The settings of the engine and of the queue in front of it."""

from __future__ import annotations

import os

import attrs

from triolet.config.setting import setting
from triolet.config.values import (
    byte_count,
    choice,
    seconds,
    share,
    switch,
    token_count,
    whole,
)

ENGINE = "Engine"

#: Prompt tokens that a step computes beside one token for every running sequence. On two CPU
#: cores prefill runs at the same 200 tokens/s in chunks of any size, while a step with 64 of
#: them takes twice as long as one without and a step with 512 ten times: small chunks cost
#: little and keep the other streams moving.
PREFILL_TOKENS_PER_STEP = 64


def _other_cores(_: object) -> int:
    """All cores that this process may use but one, which is left to the event loop."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)) - 1)
    return max(1, (os.cpu_count() or 1) - 1)


def _decodes_and_a_chunk(config: EngineSettings) -> int:
    return config.max_num_seqs + PREFILL_TOKENS_PER_STEP


@attrs.frozen(kw_only=True)
class EngineSettings:
    """A part of :class:`triolet.config.Config`."""

    threads: int = setting(
        _other_cores,
        whole(most=1024),
        ENGINE,
        help="CPU threads that compute the model.",
        default_text="all cores but one",
        other_variable="OMP_NUM_THREADS",
    )
    max_num_seqs: int = setting(
        32,
        whole(most=65_536),
        ENGINE,
        help="Most sequences that generate at the same time.",
    )
    max_num_batched_tokens: int = setting(
        _decodes_and_a_chunk,
        whole(),
        ENGINE,
        help="Most tokens computed in one step; small steps keep running streams smooth, "
        "large ones (2048) use a GPU well.",
        default_text=f"max-num-seqs + {PREFILL_TOKENS_PER_STEP}",
    )
    quantization: str = setting(
        "none",
        choice("none", "int8"),
        ENGINE,
        help="int8 rounds weights and activations of linear layers to 8 bits in blocks of 32: "
        "less memory and more speed on a CPU, slightly other logits.",
        aliases=("-q",),
    )
    block_size: int | None = setting(
        None,
        whole(most=1024),
        ENGINE,
        help="Tokens in one block of the KV cache. On a GPU, only multiples of 256 are fast.",
        default_text="16, on a GPU 256",
    )
    kv_cache_memory: int | None = setting(
        None,
        byte_count(),
        ENGINE,
        help="Size of the KV cache in bytes, for example 2GiB.",
        default_text="sized from free memory",
    )
    enable_prefix_caching: bool = setting(
        default=True,
        read=switch(),
        group=ENGINE,
        help="Compute the common beginning of prompts once, for as long as the KV cache has room.",
    )
    prefix_cache_scope: str = setting(
        "key",
        choice("key", "server"),
        ENGINE,
        help="Whose prompts share it: those of one API key, or all of the server. Across keys, "
        "who measures time can find out what others have asked.",
    )
    gpu_memory_utilization: float = setting(
        0.9,
        share(),
        ENGINE,
        help="Share of a GPU's memory that may be in use once the KV cache is there; what the "
        "model needs to compute is measured and left alone. --kv-cache-memory goes before it.",
    )
    enforce_eager: bool = setting(
        default=False,
        read=switch(),
        group=ENGINE,
        help="Run every step on a GPU kernel by kernel, instead of recording decode steps as CUDA "
        "graphs: slower, with less memory and a faster start.",
    )
    max_num_queued_reqs: int = setting(
        256,
        whole(least=0),
        ENGINE,
        help="Most requests that wait for the engine; the next one is answered 429.",
    )
    max_num_queued_tokens: int = setting(
        262_144,
        token_count(),
        ENGINE,
        help="Most prompt tokens that wait for the engine; a request that would make it more is "
        "answered 429, unless it waits alone.",
    )
    scheduling_policy: str = setting(
        "fcfs",
        choice("fcfs", "priority"),
        ENGINE,
        help="Who goes first: who came first, or whose request says `priority`, lower first. "
        "In both, API keys that wait get equal shares.",
    )
    engine_stall_timeout: float = setting(
        60.0,
        seconds(),
        ENGINE,
        help="Seconds that one engine step may take before the engine counts as dead: requests "
        "fail and the process exits with 1.",
    )

    # More choices or logprobs than OpenAI gives (128 and 20) help nobody; each choice takes a row
    # of the batch, and each logprob 120 bytes of memory here and as many on the wire.
    max_n: int = setting(
        16, whole(most=128), ENGINE, help="Most choices of one prompt that a request may ask for."
    )
    max_logprobs: int = setting(
        20,
        whole(least=0, most=1000),
        ENGINE,
        help="Most likely tokens that a request may see the logprobs of, per token.",
    )
