"""How much of a GPU the KV cache may have: what the model itself turns out to need is left alone.

A GPU without memory fails the step that asks for more, with all requests in it. So before the KV
cache takes its part, one step as large as any is run, and what it needed at its peak is set aside.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from triolet.core import RequestId, SamplingParams
from triolet.engine.plan import BlockCopy, Chunk, StepPlan
from triolet.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from triolet.engine.runner import TorchRunner


def largest_step(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int
) -> StepPlan:
    """A plan as large as any that the scheduler makes, for a pool of few pages.

    All chunks have the same page again and again: what they compute means nothing. The first is a
    chunk of a prompt at the end of the longest sequence, the others are as long as is left for
    them, and each samples in the way that takes most memory, after a copy of a page's beginning.
    """
    rows = min(max_num_seqs, max_num_batched_tokens)
    long = min(max_model_len, max_num_batched_tokens - (rows - 1))
    left = max_num_batched_tokens - long
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, logprobs=1)
    chunks = []
    for row in range(rows):
        tokens = min(max_model_len, left // (rows - row)) if row else long
        left -= tokens if row else 0
        start = 0 if row else max_model_len - long
        chunks.append(
            Chunk(
                request_id=RequestId(f"profile-{row}"),
                row=row,
                token_ids=(0,) * tokens,
                start=start,
                blocks=(0,) * -(-(start + tokens) // block_size),
                samples=True,
                sampling=sampling,
                output_index=0,
                prompt_ids=(0,) * (start + tokens),
            )
        )
    copy = BlockCopy(source=0, target=0, tokens=1)
    return StepPlan(chunks=tuple(chunks), copies=(copy,) * rows)


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Bytes that a piece of work has on a GPU at its worst, beyond what was there before."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    # What the work gave back is counted as free from here on.
    torch.cuda.empty_cache()
    return peak


def cache_bytes(*, total: int, free: int, peak: int, recorded: bool, utilization: float) -> int:
    """Bytes that the KV cache may take.

    Args:
        total: Bytes of the GPU.
        free: Bytes that nobody has, ours and other processes' taken together; the model is loaded.
        peak: What the largest step needs beside.
        recorded: Whether decode steps are recorded: their memory is kept, apart from that of
            other steps, and at most as large again.
        utilization: Share of the GPU that may be in use in the end, by anybody.

    Raises:
        ConfigError: There is nothing left.
    """
    used = total - free
    needed = used + peak * (2 if recorded else 1)
    left = int(total * utilization) - needed
    if left <= 0:
        raise ConfigError(
            f"--gpu-memory-utilization {utilization:g} allows {_gib(int(total * utilization))} of "
            f"this GPU's {_gib(total)}, but the model and whatever else runs there have "
            f"{_gib(used)} and a step needs {_gib(needed - used)}: raise it, lower "
            "--max-num-batched-tokens or --max-num-seqs, or take a smaller model.",
            param="gpu_memory_utilization",
        )
    return left


def measure_cache(
    runner: TorchRunner, plan: StepPlan, device: torch.device, *, recorded: bool, utilization: float
) -> int:
    """Run ``plan`` and say how many bytes the KV cache may take.

    Raises:
        ConfigError: The step does not fit, or leaves nothing.
    """
    try:
        peak = peak_bytes(functools.partial(runner.run, plan), device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "The GPU has no memory for one step of --max-num-batched-tokens: lower it, or "
            "--max-num-seqs, or take a smaller model.",
            param="max_num_batched_tokens",
        ) from error
    free, total = torch.cuda.mem_get_info(device)
    return cache_bytes(
        total=total, free=free, peak=peak, recorded=recorded, utilization=utilization
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
