"""Logits to token ids: one token per row, the same whatever else is in the batch.

Theory of operation. The vocabulary is never sorted as a rule. A greedy row takes the largest
logit. A row with top-k or top-p looks at its :data:`CANDIDATES` largest logits; only if what it
keeps could reach beyond them is that one row sorted as a whole. A row with neither inverts the
cumulative distribution of the whole row. All rows of one kind are computed at once.

Rule 1. Temperature, then top-k, then top-p, each on what the one before left over, as the warpers
of transformers do. All tokens that tie with the k-th are kept. Top-p keeps the smallest set of
most likely tokens that reaches ``p``; of tied tokens the lowest ids come first.
Rule 2. One uniform number per token, a pure function of seed, choice and index (:func:`uniform`).
No generator holds state, so a token does not depend on the batch or on what was sampled before.
Rule 3. Sums of probabilities are taken in float64: their order, which depends on the batch and
on the number of threads, then decides nothing.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Final

import torch
from torch.nn.functional import pad

from triolet.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from triolet.core import RequestId
    from triolet.engine.plan import Chunk

#: Logits per row looked at before a row is sorted. At 256, topk over a vocabulary of 49152
#: takes a twentieth of a sort, and the nucleus of a trained model rarely reaches so far.
CANDIDATES: Final = 256
#: Tokens whose probabilities are summed as one in the first of two searches through a row.
_SPAN: Final = 256
#: Mantissa bits of a float64: the resolution of the uniform numbers.
_UNIFORM_BITS: Final = 53
_SEED_MASK: Final = 2**64 - 1


class NonFiniteLogitsError(EngineError):
    """The model computed NaN or infinity for some rows; the KV pool may hold such numbers too.

    ``request_ids`` are the requests at fault. Reset the runner before the next step.
    """

    def __init__(self, request_ids: tuple[RequestId, ...]) -> None:
        super().__init__("The model computed numbers that are not finite.")
        self.request_ids = request_ids


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


class Sampler:
    """Samples the rows of a step. Not thread-safe: one engine, one sampler.

    Args:
        max_rows: Rows of the batch; ``Chunk.row`` is below it.
        device: Where the logits are.
    """

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        self._device = device
        self._owners: list[RequestId | None] = [None] * max_rows
        self._temperature = torch.ones(max_rows, dtype=torch.float64, device=device)
        self._top_p = torch.ones(max_rows, dtype=torch.float64, device=device)
        self._top_k = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def reset(self) -> None:
        """Forget which request owns which row."""
        self._owners = [None] * len(self._owners)

    def sample(self, logits: Tensor, chunks: Sequence[Chunk]) -> list[int]:
        """Choose one id per row.

        Args:
            logits: ``[R, vocabulary]``, any floating dtype, on the sampler's device.
            chunks: The R chunks that the rows belong to.

        Raises:
            NonFiniteLogitsError: A row has no finite maximum.
        """
        if not chunks:
            return []
        logits = logits.float()
        self._adopt(chunks)
        # max and argmax return the first of equal maxima: the lowest id.
        best, ids = logits.max(dim=-1)
        overflow = torch.zeros_like(ids, dtype=torch.bool)
        cut, whole = self._kinds(chunks, logits.shape[-1])
        if cut:
            at = self._index(cut)
            ids[at], overflow[at] = self._sample_cut(logits, best, cut, chunks, CANDIDATES)
        if whole:
            at = self._index(whole)
            weights = self._weights(logits, best, at, [chunks[i].row for i in whole])
            ids[at] = _search_row(weights, self._uniforms(whole, chunks))
        # The one synchronisation of the step: everything the host must know, in one transfer.
        answer = torch.stack((ids, overflow.long(), best.isfinite().long())).tolist()
        chosen, overflowed, finite = answer
        if not all(finite):
            bad = (chunk.request_id for chunk, good in zip(chunks, finite, strict=True) if not good)
            raise NonFiniteLogitsError(tuple(bad))
        slow = [i for i, flag in enumerate(overflowed) if flag]
        if slow:
            again, _ = self._sample_cut(logits, best, slow, chunks, logits.shape[-1])
            for i, token in zip(slow, again.tolist(), strict=True):
                chosen[i] = token
        result: list[int] = chosen
        return result

    def _adopt(self, chunks: Sequence[Chunk]) -> None:
        """Write the parameters of rows that have changed hands."""
        new = [chunk for chunk in chunks if self._owners[chunk.row] != chunk.request_id]
        if not new:
            return
        at = self._index([chunk.row for chunk in new])
        for tensor, numbers in (
            (self._temperature, [chunk.sampling.temperature for chunk in new]),
            (self._top_p, [chunk.sampling.top_p for chunk in new]),
            (self._top_k, [chunk.sampling.top_k for chunk in new]),
        ):
            tensor[at] = torch.tensor(numbers, dtype=tensor.dtype, device=self._device)
        for chunk in new:
            self._owners[chunk.row] = chunk.request_id

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
        owners = [chunks[i].row for i in rows]
        at, row = self._index(rows), self._index(owners)
        vocabulary = logits.shape[-1]
        values, ids = _largest(logits[at], min(count, vocabulary))
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
            everything = self._weights(logits, best, at, owners)
            mass = everything.sum(-1, keepdim=True, dtype=torch.float64)
            total = torch.where(limited, total, mass)
        top_p = self._top_p[row, None]
        before = weights.cumsum(-1) - weights
        kept &= (top_p >= 1) | (before < top_p * total)
        kept[:, 0] = True
        # Right only if all that was left out lies strictly below all that was kept.
        edge = values[:, -1:]
        lowest = values.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
        open_end = (lowest <= edge) | (limited & ((k - 1 > last) | (kth <= edge)))
        overflow = open_end.squeeze(1) & (last + 1 < vocabulary)
        picked = _search(weights * kept, self._uniforms(rows, chunks))
        return ids.gather(1, picked).squeeze(1), overflow

    def _weights(self, logits: Tensor, best: Tensor, at: Tensor, rows: list[int]) -> Tensor:
        """Unnormalised probabilities of whole rows: float32 ``[r, vocabulary]``, maximum 1."""
        # In float32, for speed: each has a relative error of 1e-7, the same in any batch.
        temperature = self._temperature[self._index(rows), None].clamp_min(1e-30).float()
        return (logits[at] - best[at, None]).div_(temperature).exp_()

    def _uniforms(self, rows: list[int], chunks: Sequence[Chunk]) -> Tensor:
        numbers = [uniform(chunks[i].sampling.seed, 0, chunks[i].output_index) for i in rows]
        return torch.tensor(numbers, dtype=torch.float64, device=self._device).unsqueeze(1)

    def _index(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest ``count`` logits of each row, descending, ties by ascending id; and their ids."""
    if count == logits.shape[-1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    # topk leaves the order of ties open: go back to the order of ids, then sort stably.
    ids = logits.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _search(weights: Tensor, u: Tensor) -> Tensor:
    """Invert the cumulative distribution of float64 ``[r, n]`` at ``u`` in [0, 1), ``[r, 1]``.

    Returns:
        int64 ``[r, 1]``, each the index of a weight that is not 0.
    """
    cumulative = weights.cumsum(-1)
    return _position(cumulative, u * cumulative[:, -1:])


def _search_row(weights: Tensor, u: Tensor) -> Tensor:
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
    return (span * _SPAN + place).squeeze(1)


def _position(cumulative: Tensor, target: Tensor) -> Tensor:
    """Index of the first entry above ``target``; there is weight there, or it were not above."""
    # Two sums of the same weights can differ in the last bit, so a target can reach the end.
    ceiling = cumulative[:, -1:].nextafter(torch.full_like(target, -torch.inf))
    place = torch.searchsorted(cumulative, torch.minimum(target, ceiling), right=True)
    # Only a row that is not finite gets past the end, and that row is refused.
    return place.clamp_max(cumulative.shape[-1] - 1)
