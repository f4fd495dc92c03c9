"""Paged attention over the ragged tokens of one step, for transformers' own model classes.

Theory of operation. All tokens of a step, of all its sequences, are flattened to one row
``[1, T]``: first the chunks of one token (decode rows), then the longer ones (prefill). The
model computes them as if they were one sequence; only attention must know better. transformers
looks our function up under :data:`NAME` and passes the forward's keyword arguments through to
it, so the :class:`Step` travels as one of them: nothing is global, and two engines share
nothing.

Rule 1. No mask function is registered under :data:`NAME`, so no mask arrives. Causality, sliding
windows, soft caps and sinks are ours; whatever else would change the result is refused, never
ignored.
Rule 2. Each layer first writes the step's keys and values into the pool, then reads. A token
sees the positions up to its own that lie in its window (``query - key < window``).
Rule 3. What depends on the step alone is computed once per step and distinct window.
Rule 4. Pages are read whole and masked. What lies behind a sequence's last token is its own from an
earlier step, or zero: a chunk that is the first to write to a page clears the rest of it, so that
numbers which are not finite never pass from one sequence to the next.
Rule 5. Decode rows are read in groups of like length (:mod:`~triolet.engine.grouping`).

The paged layout follows Kwon et al., "Efficient Memory Management for Large Language Model
Serving with PagedAttention" (SOSP 2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from triolet.engine.grouping import group_rows
from triolet.engine.scores import Scores
from triolet.engine.transfer import to_device
from triolet.engine.views import DecodeView, PrefillView, Views
from triolet.errors import EngineError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from triolet.engine.kv import KvPool
    from triolet.engine.plan import Chunk

#: The attention implementation's name in transformers' registry.
NAME: Final = "triolet"

#: Keyword arguments that attention functions get and that cannot change what they compute:
#: positions are applied before (rotary) or not at all, the rest asks for extra outputs.
_HARMLESS: Final = frozenset({
    "position_ids",
    "use_cache",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
})


class Step:
    """One step's tokens and where their keys and values live.

    Args:
        chunks: At least one, with at least one token each.
        pool: The pool that the chunks' block tables point into.

    Raises:
        EngineError: A block table does not cover its chunk.
    """

    def __init__(self, chunks: Sequence[Chunk], pool: KvPool) -> None:
        self.pool = pool
        # Decode rows first: their queries are then slices, without a gather.
        self.order: list[int] = sorted(range(len(chunks)), key=lambda i: _rank(chunks[i]))
        self._chunks = [chunks[i] for i in self.order]
        self.decode_rows = sum(len(chunk.token_ids) == 1 for chunk in chunks)
        size = pool.block_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        cleared: list[int] = []
        for chunk in self._chunks:
            end = chunk.start + len(chunk.token_ids)
            if not chunk.token_ids or len(chunk.blocks) * size < end:
                raise EngineError("The step's block table does not cover its tokens.")
            ids += chunk.token_ids
            positions += range(chunk.start, end)
            slots += [chunk.blocks[p // size] * size + p % size for p in range(chunk.start, end)]
            page, used = divmod(end - 1, size)
            if chunk.start <= page * size:
                begin = chunk.blocks[page] * size
                cleared += range(begin + used + 1, begin + size)
        sampled = [i for i, chunk in zip(self.last_tokens, chunks, strict=True) if chunk.samples]
        placed = self._place([ids, positions, slots, cleared, sampled])
        #: int64 ``[1, T]`` each.
        self.input_ids = placed[0].unsqueeze(0)
        self.position_ids = placed[1].unsqueeze(0)
        #: int64 ``[T]``: where each token's key and value go.
        self.slots = placed[2]
        #: int64: the rest of the pages that the step is the first to write to; rule 4.
        self.cleared = placed[3]
        #: int64: the last tokens of the chunks that sample, in the order given.
        self.sampled = placed[4]
        #: Layers that have attended in this step.
        self.layers: set[int] = set()
        self._views: dict[tuple[int | None, bool], Views] = {}

    @property
    def last_tokens(self) -> list[int]:
        """Per chunk, in the order given, the index of its last token in the flattened row."""
        last = [0] * len(self.order)
        end = 0
        for index, chunk in zip(self.order, self._chunks, strict=True):
            end += len(chunk.token_ids)
            last[index] = end - 1
        return last

    def attend(
        self,
        fresh: tuple[Tensor, Tensor, Tensor],
        pages: tuple[Tensor, Tensor],
        window: int | None,
        scores: Scores,
    ) -> Tensor:
        """One layer, all tokens, ``[T, heads, value_dim]``, once the pool has their keys.

        Args:
            fresh: Queries, keys and values of the step's tokens, ``[1, heads, T, dim]`` each.
            pages: The layer's pages of keys and of values.
            window: As ``sliding_window`` in :func:`attend`.
            scores: What becomes of the products of queries and keys.
        """
        views = self.views(window, causal_mask=not scores.plain)
        return _attend_to_pages(fresh, pages, views, scores)

    def views(self, window: int | None, *, causal_mask: bool = False) -> Views:
        """What to read under ``window`` (``None``: everything), computed on first use.

        Args:
            window: As ``sliding_window`` in :func:`attend`.
            causal_mask: Whether plain causality has a mask too.
        """
        key = window, causal_mask
        if key not in self._views:
            decode = self._decode_views(window)
            prefill = []
            begin = self.decode_rows
            for chunk in self._chunks[self.decode_rows :]:
                prefill.append(self._prefill_view(chunk, begin, window, causal_mask=causal_mask))
                begin += len(chunk.token_ids)
            self._views[key] = decode, prefill
        return self._views[key]

    def _decode_views(self, window: int | None) -> list[DecodeView]:
        size = self.pool.block_size
        firsts, tables, lengths = [], [], []
        for chunk in self._chunks[: self.decode_rows]:
            first = 0 if window is None else max(0, chunk.start + 1 - window) // size
            tables.append(chunk.blocks[first : chunk.start // size + 1])
            firsts.append(first * size)
            lengths.append(chunk.start + 1)
        return [
            self._decode_view(rows, tables[rows], firsts[rows], lengths[rows], window)
            for rows in group_rows([len(table) for table in tables], self.pool)
        ]

    def _decode_view(
        self,
        rows: slice,
        tables: list[tuple[int, ...]],
        firsts: list[int],
        lengths: list[int],
        window: int | None,
    ) -> DecodeView:
        # A row is padded with its own page: what it must not see may hold anything, so it
        # should at least be nobody else's.
        most = max(map(len, tables))
        pages = [page for table in tables for page in (*table, *(table[-1],) * (most - len(table)))]
        width = max(length - first for length, first in zip(lengths, firsts, strict=True))
        first_position = self._tensor(firsts)[:, None]
        length = self._tensor(lengths)[:, None]
        position = first_position + torch.arange(width, device=self.pool.device)
        hidden = position >= length
        if window is not None:
            hidden |= position < length - window
        plain = window is None and min(lengths) == width
        mask = None if plain else self._additive(hidden)[:, None, None]
        return DecodeView(rows, self._tensor(pages), width, mask)

    def _prefill_view(
        self, chunk: Chunk, begin: int, window: int | None, *, causal_mask: bool
    ) -> PrefillView:
        size = self.pool.block_size
        tokens = len(chunk.token_ids)
        end = chunk.start + tokens
        fits = window is None or window >= end
        first = 0 if window is None or fits else max(0, chunk.start + 1 - window) // size
        pages = None
        if chunk.start > 0:
            pages = self._tensor(chunk.blocks[first : (end - 1) // size + 1])
        mask = None
        if causal_mask or chunk.start > 0 or not fits:
            key = torch.arange(first * size, end, device=self.pool.device)
            query = torch.arange(chunk.start, end, device=self.pool.device)[:, None]
            hidden = key > query
            if window is not None and not fits:
                hidden |= key <= query - window
            mask = self._additive(hidden)
        return PrefillView(
            begin=begin, end=begin + tokens, pages=pages, width=end - first * size, mask=mask
        )

    def _place(self, lists: list[list[int]]) -> tuple[Tensor, ...]:
        """The lists as int64 tensors on the device: in one copy, whatever their number."""
        numbers = self._tensor([number for numbers in lists for number in numbers])
        return numbers.split_with_sizes([len(numbers) for numbers in lists])

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return to_device(numbers, self.pool.device)

    def _additive(self, hidden: Tensor) -> Tensor:
        # Additive in the model's dtype: SDPA would convert a boolean mask anew in every layer.
        mask = torch.zeros(hidden.shape, dtype=self.pool.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf"))


def _rank(chunk: Chunk) -> tuple[int, bool, int]:
    """What a step orders its chunks by; of equal ones, those given first are first.

    Of the decode rows those come first that are sampled from: the runner checks the keys of all
    other tokens, in one slice. Of either the longest: those read together need little padding.
    """
    if len(chunk.token_ids) > 1:
        return 1, False, 0
    return 0, not chunk.samples, -chunk.start


def attend(  # noqa: PLR0913 - the signature is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    triolet_step: Step | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attend for all tokens of a step; called by transformers once per layer.

    Args:
        module: The layer's attention module; ``layer_idx`` says which layer it is.
        query: ``[1, heads, T, head_dim]``, as all of them after rotary embedding and norms.
        key: ``[1, kv_heads, T, head_dim]``.
        value: ``[1, kv_heads, T, value_dim]``.
        attention_mask: Must be ``None`` (rule 1).
        scaling: Factor on the scores; ``None`` means ``head_dim ** -0.5``.
        sliding_window: How many positions a token sees, its own included; ``None`` sees all.
        softcap: Scores become ``softcap * tanh(score / softcap)`` before they are masked.
        s_aux: ``[heads]``: per head, the score of a sink, a place that every token sees and that
            has nothing to give.
        dropout: Must be 0.
        is_causal: Must not be false.
        triolet_step: The step, from the keyword arguments of the model's forward.
        others: Must be ``None`` or known to change nothing.

    Returns:
        ``[1, T, heads, value_dim]``, and ``None`` in place of the attention weights.

    Raises:
        UnsupportedModelError: The model asks for something that is not computed here.
    """
    if triolet_step is None:
        raise UnsupportedModelError("The model does not pass keyword arguments on to attention.")
    if attention_mask is not None:
        raise UnsupportedModelError("The model brings an attention mask of its own.")
    if dropout or is_causal is False or not getattr(module, "is_causal", True):
        raise UnsupportedModelError("The model's attention is not causal, or has dropout.")
    _refuse_unknown(others)
    scores = Scores(scaling, softcap, s_aux)
    pages = _write(module, key, value, triolet_step)
    out = triolet_step.attend((query, key, value), pages, sliding_window, scores)
    return out.unsqueeze(0), None


def _refuse_unknown(others: dict[str, object]) -> None:
    for name, setting in others.items():
        if setting is not None and name not in _HARMLESS:
            raise UnsupportedModelError(
                f"The model's attention needs {name!r}, which the engine does not compute."
            )


def _attend_to_pages(
    fresh: tuple[Tensor, Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
    views: Views,
    scores: Scores,
) -> Tensor:
    """All tokens of the step, ``[T, heads, value_dim]``."""
    decode, prefill = views
    queries = fresh[0][0].transpose(0, 1)
    out = queries.new_empty(*queries.shape[:2], pages[1].shape[-1])
    for group in decode:
        out[group.rows] = _decode(queries[group.rows], pages, group, scores)
    for view in prefill:
        out[view.begin : view.end] = _prefill(fresh, pages, view, scores)
    return out


def _write(module: nn.Module, key: Tensor, value: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """Store the step's keys and values; return the layer's pages of both."""
    pool = step.pool
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or not 0 <= layer < pool.shape.num_layers:
        raise UnsupportedModelError("The model has attention outside its numbered layers.")
    if layer in step.layers:
        raise UnsupportedModelError(f"The model attends more than once in layer {layer}.")
    step.layers.add(layer)
    shape = pool.shape
    for tensor, dim in ((key, shape.head_dim), (value, shape.value_dim)):
        expected = (1, shape.kv_heads, step.slots.numel(), dim)
        if tensor.shape != expected or tensor.dtype != pool.dtype:
            raise UnsupportedModelError(
                f"The model's keys and values are {tuple(tensor.shape)} in {tensor.dtype}; "
                f"its configuration promised {expected} in {pool.dtype}."
            )
    pool.keys[layer].index_copy_(0, step.slots, key[0].transpose(0, 1))
    pool.values[layer].index_copy_(0, step.slots, value[0].transpose(0, 1))
    return pool.key_pages[layer], pool.value_pages[layer]


def _decode(
    queries: Tensor, pages: tuple[Tensor, Tensor], view: DecodeView, scores: Scores
) -> Tensor:
    """One query per row, ``[rows, heads, dim]``: gather the pages, then one batched product."""
    rows, heads, dim = queries.shape
    kv_heads = pages[0].shape[2]
    k, v = (_gather(pool, view.pages, rows, view.width) for pool in pages)
    # The query heads that share a KV head are packed where a sequence's queries would be:
    # the keys are then read once, not once per query head.
    packed = queries.reshape(rows, kv_heads, heads // kv_heads, dim)
    if scores.plain:
        out = scaled_dot_product_attention(packed, k, v, attn_mask=view.mask, scale=scores.scaling)
    else:
        mask = None if view.mask is None else view.mask[:, 0]
        out = scores.attend(packed.unsqueeze(3), k, v, mask)
    return out.reshape(rows, heads, -1)


def _prefill(
    fresh: tuple[Tensor, Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
    view: PrefillView,
    scores: Scores,
) -> Tensor:
    """The queries of one chunk, ``[tokens, heads, dim]``: one product of their own."""
    query, k, v = (tensor[:, :, view.begin : view.end] for tensor in fresh)
    if view.pages is not None:
        k, v = (_gather(pool, view.pages, 1, view.width) for pool in pages)
    if scores.plain:
        out = scaled_dot_product_attention(
            query,
            k,
            v,
            attn_mask=view.mask,
            is_causal=view.mask is None,
            scale=scores.scaling,
            enable_gqa=True,
        )
    else:
        packed = query.reshape(1, k.shape[1], -1, *query.shape[2:])
        out = scores.attend(packed, k, v, view.mask).flatten(1, 2)
    return out[0].transpose(0, 1)


def _gather(pool: Tensor, pages: Tensor, rows: int, width: int) -> Tensor:
    """The first ``width`` positions of each row's pages: ``[rows, kv_heads, width, dim]``."""
    kv_heads, dim = pool.shape[2:]
    gathered = pool.index_select(0, pages).view(rows, -1, kv_heads, dim)
    return gathered[:, :width].transpose(1, 2)


AttentionInterface.register(NAME, attend)
