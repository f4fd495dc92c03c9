"""The paged key/value memory of the engine: one pool of pages per layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import torch

from triolet.engine.transfer import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PretrainedConfig

    from triolet.engine.plan import BlockCopy

#: Bytes of keys, or of values, that are copied from page to page at once: what the step has to have
#: for it. A page of 256 tokens of a model of 8 B parameters has 16 MiB of each.
COPIED_BYTES: Final = 64 * 2**20


@attrs.frozen
class KvShape:
    """What one token leaves behind in one layer, as the model's configuration tells it."""

    num_layers: int
    kv_heads: int
    #: Of a key.
    head_dim: int
    #: Of a value; a key's where nothing else is said.
    value_dim: int = attrs.field(default=attrs.Factory(lambda self: self.head_dim, takes_self=True))

    @classmethod
    def of(cls, config: PretrainedConfig) -> KvShape:
        """Read the shape from a transformers configuration.

        Latent attention (DeepSeek-V2's) is stored as the keys and values that it is expanded
        to. Architectures whose keys and values are not what their configuration says, or not
        the same in all layers, are refused by the attention function when it sees the first.
        """
        text: Any = config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        if getattr(text, "kv_lora_rank", None):
            key_dim = text.qk_nope_head_dim + text.qk_rope_head_dim
            return cls(text.num_hidden_layers, heads, key_dim, text.v_head_dim)
        return cls(
            num_layers=text.num_hidden_layers,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        )

    @property
    def numbers(self) -> int:
        """How many numbers one token leaves behind in one layer."""
        return self.kv_heads * (self.head_dim + self.value_dim)


def bytes_per_block(config: PretrainedConfig, *, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, keys and values together.

    Args:
        config: The model's configuration.
        block_size: Tokens per block.
        dtype: The model's dtype; keys and values are stored as they are computed.
    """
    shape = KvShape.of(config)
    return shape.num_layers * block_size * shape.numbers * dtype.itemsize


class KvPool:
    """Keys and values of all sequences: per layer ``[pages, page_size, kv_heads, head_dim]``.

    A token's slot is ``page * page_size + offset``; ``keys`` and ``values`` are the same memory
    as views by slot, ``[pages * page_size, kv_heads, head_dim]``, and ``key_pages`` and
    ``value_pages`` as views by page. The layout is the one that
    ``torch.nn.attention.varlen.varlen_attn`` takes with a block table.

    What a page held before is masked by whoever reads it. That is sound only for finite numbers (a
    weight of 0 times NaN is NaN), and a request whose numbers went wrong leaves others behind. So
    whoever is the first to write to a page clears the slots behind its own (:meth:`clear`), and so
    does who copies the beginning of a page (:meth:`copy`).

    ``spare`` pages lie behind the ``num_blocks`` that are handed out, for who needs a place that is
    nobody's.
    """

    def __init__(
        self,
        shape: KvShape,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        spare: int = 0,
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        # The first of the pages behind those that are handed out, where there is one.
        self.dummy_page = num_blocks
        size = (num_blocks + spare, block_size, shape.kv_heads)
        # A tensor made under inference_mode could not be written outside it.
        with torch.inference_mode(mode=False):
            self._keys = self._pages((*size, shape.head_dim))
            self._values = self._pages((*size, shape.value_dim))
        self.key_pages = self._keys.unbind()
        self.value_pages = self._values.unbind()
        self.keys = [pages.flatten(0, 1) for pages in self.key_pages]
        self.values = [pages.flatten(0, 1) for pages in self.value_pages]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the beginnings of pages to others, in all layers, and clear the rest of those.

        So many at once as there is memory for; :class:`~triolet.engine.plan.StepPlan` says why
        that is as good as any other order. Does not wait for the device.
        """
        a_page = max(pages[:, 0].numel() for pages in (self._keys, self._values))
        most = max(1, COPIED_BYTES // (a_page * self.dtype.itemsize))
        for begin in range(0, len(copies), most):
            self._copy(copies[begin : begin + most])

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        size = self.block_size
        sources: list[int] = []
        targets: list[int] = []
        rest: list[int] = []
        for copy in copies:
            sources.append(copy.source)
            targets.append(copy.target)
            rest += range(copy.target * size + copy.tokens, (copy.target + 1) * size)
        numbers = to_device(sources + targets + rest, self.device)
        source, target, slots = numbers.split_with_sizes([len(copies), len(copies), len(rest)])
        for pages in (self._keys, self._values):
            pages.index_copy_(1, target, pages.index_select(1, source))
        # They are another sequence's, and so may not be finite.
        self.clear(slots)

    def finite(self, slots: torch.Tensor) -> torch.Tensor:
        """Whether all numbers in these slots, int64 ``[n]``, n > 0, are finite: bool ``[]``."""
        extremes = [
            extreme
            for pages in (self._keys, self._values)
            for extreme in pages.flatten(1, 2).index_select(1, slots).aminmax()
        ]
        return torch.stack(extremes).isfinite().all()

    def clear(self, slots: torch.Tensor) -> None:
        """Write zeros to these slots, int64 ``[n]``, in all layers."""
        for pages in (self._keys, self._values):
            pages.flatten(1, 2).index_fill_(1, slots, 0)

    def _pages(self, size: tuple[int, ...]) -> torch.Tensor:
        # One tensor for all layers, so that clearing is one operation.
        return _zeros((self.shape.num_layers, *size), dtype=self.dtype, device=self.device)


def _zeros(size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take no memory before they are first written, where the device allows it.

    ``torch.zeros`` writes them out: seconds and gigabytes at start for a pool that a quiet
    server never fills. NumPy asks the system for zeroed pages, which come when they are touched.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    raw = np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(size)
