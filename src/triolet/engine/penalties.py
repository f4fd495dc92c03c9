"""Penalties on ids that a sequence has used already.

Theory of operation. A row keeps the distinct ids it is penalised for, and how often each is in
the output: counted once from prompt and output when the row changes hands, then by difference,
one increment per token. A step touches these logits and no others, in one gather and one scatter
for all rows.

Rule 1. Repetition first: the logit of every id in prompt or output, divided by the penalty where
it is positive and multiplied by it where it is negative (Keskar et al. 2019, CTRL, section 4.1,
with the sign rule of transformers' RepetitionPenaltyLogitsProcessor). Then frequency times the
count in the output, then presence where that count is not 0, both subtracted (OpenAI's API
reference, "Frequency and presence penalties"). The same order as vLLM's.
Rule 2. What is counted is ``Chunk.output_ids``, not what was sampled here: a sequence that was
preempted and computed again counts as one that was not.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch

from triolet.engine.transfer import move

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from triolet.core import SamplingParams
    from triolet.engine.plan import Chunk


class RowPenalties:
    """The penalties of one row and what they apply to. Memory: one entry per distinct id.

    Args:
        chunk: The first chunk that the row samples from; its ``prompt_ids`` are read once.
        vocabulary: Number of logits; an id at or above it cannot be sampled nor penalised.
    """

    def __init__(self, chunk: Chunk, vocabulary: int) -> None:
        self.sampling: SamplingParams = chunk.sampling
        self._vocabulary = vocabulary
        self._ids = array("q")
        self._counts = array("f")
        self._places: dict[int, int] = {}
        #: Output ids counted so far.
        self.counted = 0
        if self.sampling.repetition_penalty != 1:
            self._enter(chunk.prompt_ids)

    @staticmethod
    def wanted(sampling: SamplingParams) -> bool:
        """Whether these parameters penalise anything."""
        return bool(
            sampling.repetition_penalty != 1
            or sampling.presence_penalty
            or sampling.frequency_penalty
        )

    def count(self, output_ids: Sequence[int]) -> None:
        """Take account of the output ids that came since the last call."""
        fresh = output_ids[self.counted :]
        self._enter(fresh)
        for token in fresh:
            place = self._places.get(token)
            if place is not None:
                self._counts[place] += 1
        self.counted += len(fresh)

    @property
    def ids(self) -> Tensor:
        """int64, distinct. Shares memory: to be copied, and let go, before the next count."""
        return _view(self._ids, torch.int64)

    @property
    def counts(self) -> Tensor:
        """float32, how often each of the ids is in the output. Shares memory as ``ids`` does."""
        return _view(self._counts, torch.float32)

    def _enter(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if token not in self._places and token < self._vocabulary:
                self._places[token] = len(self._ids)
                self._ids.append(token)
                self._counts.append(0)


def penalise(logits: Tensor, at: Sequence[int], rows: Sequence[RowPenalties]) -> None:
    """Apply the penalties of some rows, in place.

    Args:
        logits: float32 ``[R, vocabulary]``.
        at: Indices of the rows that have penalties.
        rows: The penalties of each of them, up to date.
    """
    device = logits.device
    lengths = torch.tensor([len(row.ids) for row in rows])
    # cat copies, which the views need.
    ids = move(torch.cat([row.ids for row in rows]), device)
    counts = move(torch.cat([row.counts for row in rows]), device)
    sampling = [row.sampling for row in rows]

    def spread(numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
        """One number per row to one per id."""
        return move(torch.tensor(numbers, dtype=dtype).repeat_interleave(lengths), device)

    place = (spread(at, torch.int64), ids)
    values = logits[place]
    repetition = spread([s.repetition_penalty for s in sampling], torch.float32)
    values = torch.where(values < 0, values * repetition, values / repetition)
    values -= spread([s.frequency_penalty for s in sampling], torch.float32) * counts
    values -= spread([s.presence_penalty for s in sampling], torch.float32) * (counts > 0)
    logits.index_put_(place, values)


def _view(numbers: array[int] | array[float], dtype: torch.dtype) -> Tensor:
    # frombuffer refuses an empty buffer.
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)
