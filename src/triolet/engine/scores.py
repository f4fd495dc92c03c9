"""Attention with soft caps or sinks, which SDPA does not compute.

Two products with a softmax in between, in float32 whatever the model is in. The scores are in
memory, so long chunks are done in parts: on the CPU a decode step takes as long as SDPA's, a chunk
of a prompt up to 1.6 times as long. On CUDA ``torch.nn.attention.flex_attention`` could do it all
in one kernel.

The soft cap follows the Gemma team, "Gemma 2: Improving Open Language Models at a Practical Size"
(2024); the sinks are those of gpt-oss, learned ones after Xiao et al., "Efficient Streaming
Language Models with Attention Sinks" (ICLR 2024).
"""

from __future__ import annotations

from typing import Final

import attrs
import torch
from torch import Tensor

from triolet.errors import UnsupportedModelError

#: Bytes of float32 scores held at a time: a long chunk's would take gigabytes, and parts of this
#: size are long enough that the loop over them is not felt.
SCORE_BYTES: Final = 2**24


@attrs.frozen(eq=False)
class Scores:
    """What becomes of the products of queries and keys, before and in the softmax."""

    #: ``None`` means ``head_dim ** -0.5``.
    scaling: float | None
    #: Scores become ``softcap * tanh(score / softcap)`` before they are masked.
    softcap: float | None
    #: ``[heads]``: per head, the score of a place that every token sees and that has nothing to
    #: give. It only takes its share of the softmax.
    sinks: Tensor | None

    @property
    def plain(self) -> bool:
        """Whether SDPA computes the same."""
        return self.softcap is None and self.sinks is None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attend as SDPA does, with soft cap and sinks.

        Args:
            query: ``[rows, kv_heads, group, tokens, key_dim]``; the heads of a group share keys.
            key: ``[rows, kv_heads, width, key_dim]``.
            value: ``[rows, kv_heads, width, value_dim]``.
            mask: Additive, ``[rows, tokens, width]`` or of sizes that broadcast to it; ``None``
                where every token sees all of ``width``.

        Returns:
            ``[rows, kv_heads, group, tokens, value_dim]``.

        Raises:
            UnsupportedModelError: There is not one sink per head.
        """
        rows, kv_heads, group, tokens, dim = query.shape
        if self.sinks is not None and self.sinks.numel() != kv_heads * group:
            raise UnsupportedModelError(
                f"The model's attention sinks are {tuple(self.sinks.shape)}; only one for each of "
                f"its {kv_heads * group} heads is computed."
            )
        if mask is None:
            mask = query.new_zeros(1, 1, 1)
        mask = mask.expand(rows, tokens, key.shape[2])
        most = max(1, SCORE_BYTES // (4 * rows * kv_heads * group * key.shape[2]))
        scaling = dim**-0.5 if self.scaling is None else self.scaling
        parts = []
        for begin in range(0, tokens, most):
            some = slice(begin, begin + most)
            parts.append(self._attend(query[:, :, :, some], key, value, mask[:, some], scaling))
        return torch.cat(parts, 3)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
    ) -> Tensor:
        heads = query.shape[:3]
        # The heads of a group lie where a head's tokens would: no key is copied for each.
        scores = _product(query.flatten(2, 3), key.transpose(2, 3)).float() * scaling
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        scores = scores.view(*heads, *mask.shape[1:]) + mask[:, None, None]
        if self.sinks is not None:
            sinks = self.sinks.float().view(*heads[1:], 1, 1)
            scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
        weights = scores.softmax(-1)[..., : key.shape[2]].flatten(2, 3)
        out = _product(weights.to(value.dtype), value)
        return out.view(*query.shape[:4], value.shape[3])


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``, both ``[rows, heads, ...]``."""
    # Row by row: over both dimensions at once, torch first copies what does not lie head by head,
    # and keys and values do not. That took five times as long (8 rows of 1,024 tokens).
    return torch.stack([torch.bmm(*pair) for pair in zip(left, right, strict=True)])
