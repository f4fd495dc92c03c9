"""Draws from distributions by inverting their cumulative sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from torch import Tensor

#: Tokens whose probabilities are summed as one in the first of two searches through a row.
_SPAN: Final = 256


def search(weights: Tensor, u: Tensor) -> Tensor:
    """Invert the cumulative distribution of float64 ``[r, n]`` at ``u`` in [0, 1), ``[r, 1]``.

    Returns:
        int64 ``[r, 1]``, each the index of a weight that is not 0.
    """
    cumulative = weights.cumsum(-1)
    return _position(cumulative, u * cumulative[:, -1:])


def search_row(weights: Tensor, u: Tensor) -> Tensor:
    """The same over float32 ``[r, vocabulary]``: first the span of ids, then the id in it.

    A float64 cumulative sum over all of the row costs several times as much.
    """
    rows, vocabulary = weights.shape
    spans = pad(weights, (0, -vocabulary % _SPAN)).view(rows, -1, _SPAN)
    mass = spans.sum(-1, dtype=torch.float64)
    cumulative = mass.cumsum(-1)
    target = u * cumulative[:, -1:]
    span = _position(cumulative, target)
    before = (cumulative - mass).gather(1, span)
    chosen = spans.gather(1, span[:, :, None].expand(-1, -1, _SPAN)).squeeze(1)
    place = _position(chosen.cumsum(-1, dtype=torch.float64), target - before)
    # The padding after the last id has no weight; again, a row that is not finite gets there.
    return (span * _SPAN + place).squeeze(1).clamp_max(vocabulary - 1)


def _position(cumulative: Tensor, target: Tensor) -> Tensor:
    """Index of the first entry above ``target``; there is weight there, or it were not above."""
    # Two sums of the same weights can differ in the last bit, so a target can reach the end.
    ceiling = cumulative[:, -1:].nextafter(torch.full_like(target, -torch.inf))
    place = torch.searchsorted(cumulative, torch.minimum(target, ceiling), right=True)
    # Only a row that is not finite gets past the end, and that row is refused.
    return place.clamp_max(cumulative.shape[-1] - 1)
