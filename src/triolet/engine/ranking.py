"""The largest logits of a row in a defined order, without sorting the row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Logits whose maximum is taken as one in the first of two searches for the largest.
_SPAN: Final = 256


def maximum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, NaN where there is one, and the lowest id that has it.

    The same as ``logits.max(-1)``, but on a CPU that takes five times as long: there the maximum
    alone is vectorised, and the search for its place is not.

    Args:
        logits: ``[r, vocabulary]``.
    """
    vocabulary = logits.shape[-1]
    whole = vocabulary - vocabulary % _SPAN
    peaks = [logits[:, :whole].view(len(logits), -1, _SPAN).amax(-1)] if whole else []
    if whole < vocabulary:
        peaks.append(logits[:, whole:].amax(-1, keepdim=True))
    # max and argmax return the first of equal maxima.
    best, span = torch.cat(peaks, dim=1).max(-1)
    begin = span * _SPAN
    place = begin[:, None] + torch.arange(_SPAN, device=logits.device)
    chosen = logits.gather(1, place.clamp_max(vocabulary - 1))
    return best, begin + chosen.argmax(-1)


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest ``count`` logits of each row, descending, ties by ascending id; and their ids.

    Of the ids that tie with the last one, any may be among them: what lies strictly above the
    last one is defined, and all of it where ``count`` is the whole row.

    Args:
        logits: ``[r, vocabulary]``.
        count: At most ``vocabulary``.

    Returns:
        Values in the dtype of the logits and int64 ids, both ``[r, count]``.
    """
    if count == logits.shape[-1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    # topk leaves the order of ties open: go back to the order of ids, then sort stably.
    ids = logits.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
