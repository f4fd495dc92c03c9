"""Ids that a row cannot sample, and ids whose logits are biased.

Theory of operation. What a request asks for is turned into index tensors once, when a row changes
hands. A step gathers the tensors of the rows that have any and writes them in a handful of
indexed operations for all rows; a row's logits are never walked in Python. Only bad words of
several ids depend on what came before: they are looked up by the id before their last one.

Rule 1. Allowed ids, then bad words, then the ids that would end the choice too early, then the
bias. A mask is minus infinity, which no bias and no penalty undoes, so of this order only "masks
beat bias" shows; it is vLLM's, and transformers' processors give the same in theirs.
Rule 2. The last id of a bad word is masked where the ids before it end the prompt and output
together, as transformers' NoBadWordsLogitsProcessor does; vLLM looks at the output alone. An
end-of-sequence id may be a bad word, which transformers overlooks.
Rule 3. For the output ids before the ``min_tokens``-th, ``stop_token_ids`` are masked, and
the model's end-of-sequence ids unless ``ignore_eos`` makes them ordinary (transformers'
MinNewTokensLengthLogitsProcessor, vLLM's MinTokensLogitsProcessor).
Rule 4. Ids that the model has no logit for are passed over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from triolet.engine.transfer import move, to_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from triolet.core import SamplingParams
    from triolet.engine.plan import Chunk


class RowMasks:
    """The masks and biases of one row.

    Args:
        sampling: What the request asks for.
        eos_token_ids: The model's end-of-sequence ids.
        vocabulary: Number of logits.
    """

    def __init__(
        self, sampling: SamplingParams, eos_token_ids: frozenset[int], vocabulary: int
    ) -> None:
        def known(ids: Iterable[int]) -> Tensor:
            return torch.tensor([i for i in ids if i < vocabulary], dtype=torch.int64)

        allowed = sampling.allowed_token_ids
        words = [word for word in sampling.bad_words_ids if word and word[-1] < vocabulary]
        self.allowed = None if allowed is None else known(sorted(allowed))
        self.banned = known({word[0] for word in words if len(word) == 1})
        self.ends = known(sorted(_ends(sampling, eos_token_ids)))
        self.min_tokens = sampling.min_tokens
        pairs = [(i, bias) for i, bias in sampling.logit_bias if i < vocabulary]
        self.biased = known(i for i, _ in pairs)
        self.bias = torch.tensor([bias for _, bias in pairs], dtype=torch.float32)
        #: By the id before its last one: the ids before that one, and the last one.
        self._phrases: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for word in words:
            if len(word) > 1:
                self._phrases.setdefault(word[-2], []).append((word[:-2], word[-1]))

    @staticmethod
    def wanted(sampling: SamplingParams) -> bool:
        """Whether these parameters mask or bias anything."""
        return bool(
            sampling.allowed_token_ids is not None
            or sampling.bad_words_ids
            or sampling.min_tokens
            or sampling.logit_bias
        )

    def masked(self, chunk: Chunk) -> list[Tensor]:
        """int64 tensors of the ids that cannot follow this chunk, ``allowed`` aside."""
        masked = [self.banned]
        if len(chunk.output_ids) + 1 < self.min_tokens:
            masked.append(self.ends)
        if self._phrases and (completions := self._completions(chunk)):
            masked.append(torch.tensor(completions))
        return masked

    def _completions(self, chunk: Chunk) -> list[int]:
        """Last ids of the bad words of which all the rest ends the context."""
        output, prompt = chunk.output_ids, chunk.prompt_ids
        phrases = self._phrases.get((output or prompt)[-1], ())

        def ends_with(ids: tuple[int, ...]) -> bool:
            # The id before the last one matches already; ``ids`` come before it.
            size = len(ids) + 1
            tail = tuple(output[-size:])
            if len(tail) < size:
                tail = prompt[-(size - len(tail)) :] + tail
            return tail[:-1] == ids

        return [last for ids, last in phrases if ends_with(ids)]


def apply_masks(
    logits: Tensor, at: Sequence[int], rows: Sequence[RowMasks], chunks: Sequence[Chunk]
) -> None:
    """Mask and bias some rows, in place.

    Args:
        logits: float32 ``[R, vocabulary]``.
        at: Indices of the rows that have masks.
        rows: The masks of each of them.
        chunks: The chunk that each of them samples from.
    """
    allowed = [(i, row.allowed) for i, row in zip(at, rows, strict=True) if row.allowed is not None]
    if allowed:
        place = _places(allowed, logits.device)
        values = logits[place]
        lines = to_device([i for i, _ in allowed], logits.device)
        logits.index_fill_(0, lines, -torch.inf)
        logits.index_put_(place, values)
    masked = [
        (i, ids)
        for i, row, chunk in zip(at, rows, chunks, strict=True)
        for ids in row.masked(chunk)
        if len(ids)
    ]
    if masked:
        # Not new_tensor: on a GPU that is a copy which waits.
        logits.index_put_(_places(masked, logits.device), logits.new_full((), -torch.inf))
    biased = [(i, row.biased) for i, row in zip(at, rows, strict=True) if len(row.biased)]
    if biased:
        bias = move(torch.cat([row.bias for row in rows]), logits.device)
        logits.index_put_(_places(biased, logits.device), bias, accumulate=True)


def _ends(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    return sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos_token_ids)


def _places(pairs: Sequence[tuple[int, Tensor]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and id of every entry of the tensors of ids."""
    lengths = torch.tensor([len(ids) for _, ids in pairs])
    lines = torch.tensor([i for i, _ in pairs]).repeat_interleave(lengths)
    return move(lines, device), move(torch.cat([ids for _, ids in pairs]), device)
