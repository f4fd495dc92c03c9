"""Attention on CUDA: one kernel for all tokens of a step, which reads the pages where they lie.

Theory of operation. ``torch.nn.attention.varlen.varlen_attn`` takes queries of uneven lengths in a
row, and keys and values in pages with a table of pages per sequence: what a step and the pool are.
Decode rows and chunks of prompts go through it together, one call per layer. Where it cannot
compute something (a soft cap, sinks, a dtype, an old GPU or torch), the pages are gathered as on
the CPU; that is decided once per pool, and once per layer for what a model asks for.

Rule 1. Pages of a multiple of 256 tokens, float16 or bfloat16, keys and values of one size, a
multiple of 8 and at most 256, on a GPU of compute capability 8.0 or newer: what the
FlashAttention 2 in torch asks for (``mha_varlen_fwd`` of its ``flash_api.cpp``).
Rule 2. The kernel aligns queries with the last keys, so ``(-1, 0)`` is causal for a chunk in the
middle of a sequence too. A window counts the token itself, the kernel's does not.
Rule 3. Where every sequence has one query, causal and not causal are the same, and only the second
lets the kernel pack the heads that share keys and split long sequences among processors.
Rule 4. Nothing here reads a number back: the longest lengths come from the plan, on the host.

The kernel is that of Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
Partitioning" (2023).
"""

from __future__ import annotations

import functools
import inspect
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from triolet.engine.attention import Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from triolet.engine.kv import KvPool
    from triolet.engine.scores import Scores

#: Tokens per page: the kernel takes multiples of 256.
CUDA_PAGE: Final = 256
#: The same where pages are gathered: small ones waste less.
CPU_PAGE: Final = 16
#: The oldest GPUs that the kernel runs on, and the largest head.
_CAPABILITY: Final = (8, 0)
_MOST_HEAD_DIM: Final = 256


def page_size(device: torch.device) -> int:
    """Tokens per page that suit a device."""
    return CUDA_PAGE if device.type == "cuda" else CPU_PAGE


@functools.cache
def find_kernel() -> Callable[..., Any] | None:
    """Torch's kernel; ``None`` where it knows no pages (before 2.12), or is built for no CUDA."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - not in every torch
    except ImportError:
        return None
    knows_pages = "block_table" in inspect.signature(varlen_attn).parameters
    return varlen_attn if knows_pages and torch.version.cuda is not None else None


def why_gathered(pool: KvPool) -> str | None:
    """What stands against the kernel for this pool, as the end of a sentence; ``None``: nothing."""
    shape = pool.shape
    reasons = {
        f"the model runs on {pool.device.type}": pool.device.type != "cuda",
        f"the model is in {pool.dtype}": pool.dtype not in {torch.float16, torch.bfloat16},
        f"blocks have {pool.block_size} tokens": pool.block_size % CUDA_PAGE != 0,
        "keys and values differ in size": shape.head_dim != shape.value_dim,
        f"heads have {shape.head_dim} numbers": (
            shape.head_dim % 8 != 0 or shape.head_dim > _MOST_HEAD_DIM
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            return reason
    if find_kernel() is None:
        return f"torch {torch.__version__} has no such kernel"
    if torch.cuda.get_device_capability(pool.device) < _CAPABILITY:
        return "the GPU is older than the kernel"
    return None


@attrs.frozen(eq=False)
class PagedRows:
    """Sequences in pages, as the kernel takes them; all tensors int32, on the device."""

    #: ``[N + 1]``: where each sequence's queries begin, and where the last one's end.
    starts: Tensor
    #: ``[N]``: how many keys each sequence has, those of this step included.
    lengths: Tensor
    #: ``[N, pages]``; behind a sequence's last page, anything that is a page.
    tables: Tensor
    #: At least the largest number of queries, and of keys, that one sequence has.
    most_queries: int
    most_keys: int
    #: ``[N + 1]``: sums of the lengths. The kernel demands them and, given pages, ignores them.
    key_starts: Tensor = attrs.field(
        init=False,
        default=attrs.Factory(
            lambda self: pad(self.lengths.cumsum(0, dtype=torch.int32), (1, 0)), takes_self=True
        ),
    )

    def attend(
        self,
        query: Tensor,
        pages: tuple[Tensor, Tensor],
        window: int | None,
        scaling: float | None,
    ) -> Tensor:
        """Attend in one layer.

        Args:
            query: ``[1, heads, T, dim]``.
            pages: Keys and values, ``[pages, page_size, kv_heads, dim]`` each.
            window: How many positions a token sees, its own included; ``None`` sees all.
            scaling: Factor on the scores; ``None`` means ``dim ** -0.5``.

        Returns:
            ``[T, heads, dim]``.
        """
        kernel = find_kernel()
        assert kernel is not None  # noqa: S101 - why_gathered() has said so
        out: Tensor = kernel(
            query[0].transpose(0, 1),
            *pages,
            self.starts,
            self.key_starts,
            self.most_queries,
            self.most_keys,
            scale=scaling,
            window_size=self._window(window),
            enable_gqa=True,
            seqused_k=self.lengths,
            block_table=self.tables,
        )
        return out

    def _window(self, window: int | None) -> tuple[int, int]:
        """Keys seen before and behind a query's own; rules 2 and 3."""
        if window is not None and window < self.most_keys:
            return window - 1, 0
        return (-1, -1) if self.most_queries == 1 else (-1, 0)


class VarlenStep(Step):
    """A step that attends with the kernel wherever it computes what a layer asks for."""

    def attend(
        self,
        fresh: tuple[Tensor, Tensor, Tensor],
        pages: tuple[Tensor, Tensor],
        window: int | None,
        scores: Scores,
    ) -> Tensor:
        """As :meth:`~triolet.engine.attention.Step.attend`."""
        if not scores.plain:
            return super().attend(fresh, pages, window, scores)
        return self._rows.attend(fresh[0], pages, window, scores.scaling)

    def _place(self, lists: list[list[int]]) -> tuple[Tensor, ...]:
        size = self.pool.block_size
        queries = [len(chunk.token_ids) for chunk in self._chunks]
        lengths = [chunk.start + n for chunk, n in zip(self._chunks, queries, strict=True)]
        width = -(-max(lengths) // size)
        tables: list[int] = []
        for chunk, length in zip(self._chunks, lengths, strict=True):
            used = chunk.blocks[: -(-length // size)]
            tables += (*used, *(used[-1],) * (width - len(used)))
        starts = list(accumulate(queries, initial=0))
        *placed, first, count, table = super()._place([*lists, starts, lengths, tables])
        self._rows = PagedRows(
            starts=first.int(),
            lengths=count.int(),
            tables=table.int().view(-1, width),
            most_queries=max(queries),
            most_keys=max(lengths),
        )
        return tuple(placed)


def step_kind(pool: KvPool) -> type[Step]:
    """The kind of step that attends in the fastest way the pool allows."""
    return Step if why_gathered(pool) else VarlenStep
