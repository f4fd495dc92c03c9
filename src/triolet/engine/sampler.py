"""Logits to token ids: one token per row, the same whatever else is in the batch.

Theory of operation. The vocabulary is never sorted as a rule. A greedy row takes the largest
logit. A row with top-k or top-p looks at its :data:`CANDIDATES` largest logits; only if what it
keeps could reach beyond them is that one row sorted as a whole. A row with neither inverts the
cumulative distribution of the whole row; min-p needs the maximum alone and only adds a threshold
to either. All rows of one kind are computed at once, and what no row asks for costs nothing.

Rule 1. Order: log-probabilities of the raw logits; masks and bias (:mod:`~triolet.engine.masks`);
penalties (:mod:`~triolet.engine.penalties`); for a greedy row the largest of these; for others
temperature, min-p, top-k, top-p, each on what the one before left over. It is the order of vLLM's
V1 sampler. transformers has the same processors, but applies min-p last: the two differ where
min-p and top-p are used together, since here top-p is a share of what min-p left.
Rule 2. Min-p keeps ids at least ``min_p`` times as likely as the most likely one (Nguyen et al.
2024, "Turning up the heat: min-p sampling"), compared as logits. All tokens that tie with the
k-th are kept by top-k. Top-p keeps the smallest set of most likely tokens that reaches ``p``; of
tied tokens the lowest ids come first.
Rule 3. One uniform number per token, a pure function of seed, choice and index (:func:`uniform`).
No generator holds state, so a token does not depend on the batch or on what was sampled before.
Rule 4. Sums of probabilities are taken in float64: their order, which depends on the batch and
on the number of threads, then decides nothing.
Rule 5. A row belongs to a choice of a request. What is kept of it is written when the row changes
hands and follows ``Chunk.output_ids`` from there, so a preempted sequence loses nothing.
"""

from __future__ import annotations

import hashlib
import math
import struct
from typing import TYPE_CHECKING, Final

import attrs
import torch

from triolet.core import RequestId, SamplingParams
from triolet.engine.inversion import search, search_row
from triolet.engine.logprobs import DEFAULT_MAX_LOGPROBS, Scores
from triolet.engine.masks import RowMasks, apply_masks
from triolet.engine.penalties import RowPenalties, penalise
from triolet.engine.plan import NOT_FINITE, NOTHING_LEFT, Sample
from triolet.engine.ranking import largest, maximum
from triolet.engine.transfer import to_device, to_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from triolet.core import TokenLogprobs
    from triolet.engine.plan import Chunk
    from triolet.engine.transfer import Flag

#: Logits per row looked at before a row is sorted. At 256, topk over a vocabulary of 49152
#: takes a twentieth of a sort, and the nucleus of a trained model rarely reaches so far.
CANDIDATES: Final = 256
#: Mantissa bits of a float64: the resolution of the uniform numbers.
_UNIFORM_BITS: Final = 53
_SEED_MASK: Final = 2**64 - 1


def uniform(seed: int, choice: int, output_index: int) -> float:
    """The random number behind one token: in [0, 1), a multiple of 2**-53.

    Args:
        seed: The request's seed, 64 bits.
        choice: Which of the request's choices.
        output_index: Index of the token among the choice's output tokens, from 0.
    """
    key = struct.pack("<QQQ", seed & _SEED_MASK, choice, output_index)
    digest = hashlib.blake2b(key, digest_size=8, person=b"triolet.sample").digest()
    return (int.from_bytes(digest, "little") >> (64 - _UNIFORM_BITS)) * 2.0**-_UNIFORM_BITS


@attrs.define(eq=False)
class _Row:
    """What the sampler keeps of the choice that owns a row."""

    request_id: RequestId
    choice: int
    sampling: SamplingParams
    masks: RowMasks | None
    penalties: RowPenalties | None

    def owns(self, chunk: Chunk) -> bool:
        """Whether the chunk continues what this row was written for."""
        return (
            self.request_id == chunk.request_id
            and self.choice == chunk.choice
            # The same object: a request that took the name of an earlier one has another.
            and self.sampling is chunk.sampling
            and (self.penalties is None or self.penalties.counted <= len(chunk.output_ids))
        )


class Sampler:
    """Samples the rows of a step. Not thread-safe: one engine, one sampler.

    Args:
        max_rows: Rows of the batch; ``Chunk.row`` is below it.
        device: Where the logits are.
        eos_token_ids: The model's end-of-sequence ids, which ``min_tokens`` holds back.
        max_logprobs: Most likely ids reported at most, whatever a request asks for.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        device: torch.device,
        eos_token_ids: frozenset[int] = frozenset(),
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
    ) -> None:
        self._device = device
        self._eos_token_ids = eos_token_ids
        self._max_logprobs = max_logprobs
        self._rows: list[_Row | None] = [None] * max_rows
        self._temperature = torch.ones(max_rows, dtype=torch.float64, device=device)
        self._top_p = torch.ones(max_rows, dtype=torch.float64, device=device)
        self._top_k = torch.zeros(max_rows, dtype=torch.int64, device=device)
        # How far below the row's maximum min-p lets a logit be: 0 or less.
        self._reach = torch.full((max_rows,), -torch.inf, device=device)

    def reset(self) -> None:
        """Forget which choice owns which row."""
        self._rows = [None] * len(self._rows)

    def sample(
        self, logits: Tensor, chunks: Sequence[Chunk], flag: Flag | None = None
    ) -> list[Sample]:
        """Choose one id per row.

        Args:
            logits: ``[R, vocabulary]``, any floating dtype, on the sampler's device. Written
                over where a row has masks or penalties.
            chunks: The R chunks that the rows belong to.
            flag: Read along with the ids, where there are any.

        Returns:
            One sample per row. Its id is :data:`~triolet.engine.plan.NOTHING_LEFT` where the
            masks of a request allow no id at all, and :data:`~triolet.engine.plan.NOT_FINITE` where
            the row has no finite maximum. No other row is changed by such a row.
        """
        if not chunks:
            return []
        logits = logits.float()
        rows = self._adopt(chunks, logits.shape[-1])
        wanted = [i for i, chunk in enumerate(chunks) if chunk.sampling.logprobs is not None]
        scores = self._score(logits, wanted, rows) if wanted else None
        masked = self._edit(logits, rows, chunks)
        best, ids, overflow = self._choose(logits, chunks)
        empty = best == -torch.inf
        sound = best.isfinite()
        if masked:
            at = self._index(masked)
            sound[at] |= empty[at]
        if scores is not None:
            sound[self._index(wanted)] &= scores.finite
        facts = [ids, overflow & sound & ~empty, sound, empty]
        if flag is not None:
            facts.append(flag.there.expand_as(sound))
        numbers, answer = _fetch(torch.stack(facts), ids, scores, wanted)
        chosen, overflowed, fine, nothing, *along = numbers
        if flag is not None:
            flag.here = bool(along[0][0])
        slow = [i for i, open_end in enumerate(overflowed) if open_end]
        if slow:
            at = self._index(slow)
            ids[at], _ = self._sample_cut(logits, best, slow, chunks, logits.shape[-1])
            (chosen,), answer = _fetch(ids[None], ids, scores, wanted)
        tokens = [
            (NOTHING_LEFT if none else token) if good else NOT_FINITE
            for token, good, none in zip(chosen, fine, nothing, strict=True)
        ]
        entries: list[TokenLogprobs | None] = [None] * len(tokens)
        if scores is not None:
            tops = [self._top(rows[i]) for i in wanted]
            read = scores.read(answer, [tokens[i] for i in wanted], tops)
            for i, entry in zip(wanted, read, strict=True):
                entries[i] = entry if tokens[i] >= 0 else None
        return [Sample(*pair) for pair in zip(tokens, entries, strict=True)]

    def _choose(self, logits: Tensor, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor, Tensor]:
        """Per row: the largest logit, the id, and whether it took too few candidates to tell."""
        best, ids = maximum(logits)
        overflow = torch.zeros_like(ids, dtype=torch.bool)
        cut, whole = self._kinds(chunks, logits.shape[-1])
        if cut:
            at = self._index(cut)
            ids[at], overflow[at] = self._sample_cut(logits, best, cut, chunks, CANDIDATES)
        if whole:
            at = self._index(whole)
            weights = self._weights(logits, best, whole, chunks)
            ids[at] = search_row(weights, self._uniforms(whole, chunks))
        return best, ids, overflow

    def _score(self, logits: Tensor, wanted: list[int], rows: list[_Row]) -> Scores:
        """Look at the raw logits of the rows that ask for log-probabilities."""
        edited = any(row.masks or row.penalties for row in rows)
        if edited or len(wanted) < len(rows):
            # A copy: the logits themselves are written over next.
            logits = logits[self._index(wanted)]
        return Scores(logits, max(self._top(rows[i]) for i in wanted))

    def _top(self, row: _Row) -> int:
        return min(row.sampling.logprobs or 0, self._max_logprobs)

    def _adopt(self, chunks: Sequence[Chunk], vocabulary: int) -> list[_Row]:
        """The rows of the chunks; those that have changed hands are written first."""
        rows, new = [], []
        for chunk in chunks:
            row = self._rows[chunk.row]
            if row is None or not row.owns(chunk):
                new.append(chunk)
                row = self._rows[chunk.row] = self._new_row(chunk, vocabulary)
            rows.append(row)
        if new:
            self._write([chunk.row for chunk in new], [chunk.sampling for chunk in new])
        return rows

    def _new_row(self, chunk: Chunk, vocabulary: int) -> _Row:
        sampling = chunk.sampling
        masks = penalties = None
        if RowMasks.wanted(sampling):
            masks = RowMasks(sampling, self._eos_token_ids, vocabulary)
        if RowPenalties.wanted(sampling):
            penalties = RowPenalties(chunk, vocabulary)
        return _Row(chunk.request_id, chunk.choice, sampling, masks, penalties)

    def _write(self, rows: list[int], sampling: list[SamplingParams]) -> None:
        at = self._index(rows)
        for tensor, numbers in (
            (self._temperature, [s.temperature for s in sampling]),
            (self._top_p, [s.top_p for s in sampling]),
            (self._top_k, [s.top_k for s in sampling]),
            (self._reach, [_reach(s) for s in sampling]),
        ):
            tensor[at] = to_device(numbers, self._device, tensor.dtype)

    @staticmethod
    def _edit(logits: Tensor, rows: list[_Row], chunks: Sequence[Chunk]) -> list[int]:
        """Apply masks, bias and penalties in place; return the indices of rows with masks."""
        masked = [(i, row.masks) for i, row in enumerate(rows) if row.masks]
        if masked:
            at = [i for i, _ in masked]
            apply_masks(logits, at, [masks for _, masks in masked], [chunks[i] for i in at])
        penalised = [(i, row.penalties) for i, row in enumerate(rows) if row.penalties]
        if penalised:
            for i, penalties in penalised:
                penalties.count(chunks[i].output_ids)
            penalise(logits, [i for i, _ in penalised], [row for _, row in penalised])
        return [i for i, _ in masked]

    @staticmethod
    def _kinds(chunks: Sequence[Chunk], vocabulary: int) -> tuple[list[int], list[int]]:
        """Rows that cut the distribution off somewhere, and rows that draw from all of it."""
        cut, whole = [], []
        for i, chunk in enumerate(chunks):
            sampling = chunk.sampling
            if sampling.temperature == 0:
                continue
            if sampling.top_p < 1 or 0 < sampling.top_k < vocabulary:
                cut.append(i)
            else:
                whole.append(i)
        return cut, whole

    def _sample_cut(
        self, logits: Tensor, best: Tensor, rows: list[int], chunks: Sequence[Chunk], count: int
    ) -> tuple[Tensor, Tensor]:
        """Sample rows with top-k or top-p from their ``count`` largest logits.

        Returns:
            The ids, and whether the row needs more candidates than these to be right.
        """
        at, row = self._index(rows), self._index([chunks[i].row for i in rows])
        vocabulary = logits.shape[-1]
        values, ids = largest(logits[at], min(count, vocabulary))
        if any(chunks[i].sampling.min_p for i in rows):
            short = values - best[at, None] < self._reach[row, None]
            values.masked_fill_(short, -torch.inf)
        scaled = (values.double() - best[at, None]) / self._temperature[row, None]
        weights = scaled.exp()
        k = self._top_k[row, None]
        limited = (k > 0) & (k < vocabulary)
        last = values.shape[-1] - 1
        kth = values.gather(1, (k - 1).clamp(0, last))
        kept = ~limited | (values >= kth)
        # The mass that top-p is a share of: what top-k left, or else the whole row.
        total = (weights * kept).sum(-1, keepdim=True)
        if any(not 0 < chunks[i].sampling.top_k < vocabulary for i in rows):
            everything = self._weights(logits, best, rows, chunks)
            mass = everything.sum(-1, keepdim=True, dtype=torch.float64)
            total = torch.where(limited, total, mass)
        top_p = self._top_p[row, None]
        before = weights.cumsum(-1) - weights
        kept &= (top_p >= 1) | (before < top_p * total)
        kept[:, 0] = True
        # Right only if all that was left out lies strictly below all that was kept, or is
        # impossible anyway.
        edge = values[:, -1:]
        lowest = values.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
        open_end = (lowest <= edge) | (limited & ((k - 1 > last) | (kth <= edge)))
        open_end &= edge > -torch.inf
        overflow = open_end.squeeze(1) & (last + 1 < vocabulary)
        picked = search(weights * kept, self._uniforms(rows, chunks))
        return ids.gather(1, picked).squeeze(1), overflow

    def _weights(
        self, logits: Tensor, best: Tensor, rows: list[int], chunks: Sequence[Chunk]
    ) -> Tensor:
        """Unnormalised probabilities of whole rows: float32 ``[r, vocabulary]``, maximum 1."""
        at, row = self._index(rows), self._index([chunks[i].row for i in rows])
        # In float32, for speed: each has a relative error of 1e-7, the same in any batch.
        temperature = self._temperature[row, None].clamp_min(1e-30).float()
        below = logits[at] - best[at, None]
        if any(chunks[i].sampling.min_p for i in rows):
            below.masked_fill_(below < self._reach[row, None], -torch.inf)
        return below.div_(temperature).exp_()

    def _uniforms(self, rows: list[int], chunks: Sequence[Chunk]) -> Tensor:
        numbers = [
            uniform(chunk.sampling.seed, chunk.choice, chunk.output_index)
            for chunk in (chunks[i] for i in rows)
        ]
        return to_device(numbers, self._device, torch.float64).unsqueeze(1)

    def _index(self, numbers: list[int]) -> Tensor:
        return to_device(numbers, self._device)


def _reach(sampling: SamplingParams) -> float:
    """The distance from the largest logit at which min-p's share of its probability lies."""
    if not sampling.min_p:
        return -math.inf
    return sampling.temperature * math.log(sampling.min_p)


def _fetch(
    facts: Tensor, ids: Tensor, scores: Scores | None, wanted: list[int]
) -> tuple[list[list[int]], list[list[float]]]:
    """Bring int64 ``[n, R]``, and what the scores say of the ids, to the host.

    The one synchronisation of a step: everything the host must know, in one transfer.
    """
    if scores is None:
        return to_host(facts), []
    answer = scores.answer(ids[to_device(wanted, ids.device)])
    # float64 holds all of these integers exactly.
    flat = to_host(torch.cat((facts.double().flatten(), answer.flatten())))
    size, rows, width = facts.numel(), len(ids), scores.width
    integers = [[int(number) for number in flat[i : i + rows]] for i in range(0, size, rows)]
    return integers, [flat[i : i + width] for i in range(size, len(flat), width)]
