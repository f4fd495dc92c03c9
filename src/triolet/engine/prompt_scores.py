"""Log-probabilities of the prompt tokens that the chunks of a step predict.

Theory of operation. Logits at position ``p`` are about the prompt token at ``p + 1``. A chunk with
``scores_prompt`` needs them at all its positions that have such a token, which for a long chunk
and a large vocabulary is more memory than the rest of the step together. So the positions of all
chunks stand in one list, and the runner takes them piece by piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from triolet.engine.logprobs import Scores
from triolet.engine.transfer import to_device, to_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from triolet.core import RequestId, TokenLogprobs
    from triolet.engine.plan import Chunk

#: Bytes of float32 logits at once. Scoring holds about three times as much for a moment. At a
#: vocabulary of 128,256 it is 130 positions: enough for the head to run at its full speed.
PIECE_BYTES: Final = 64 * 2**20


class PromptScores:
    """The prompt tokens that one step predicts, and what is found out about them.

    Args:
        chunks: All chunks of the step.
        last_tokens: Per chunk, the index of its last token in the flattened row.
        vocabulary: Number of logits per position.
        max_top: Most likely ids reported per position at most.
    """

    def __init__(
        self, chunks: Sequence[Chunk], last_tokens: Sequence[int], *, vocabulary: int, max_top: int
    ) -> None:
        self._length = max(1, PIECE_BYTES // (vocabulary * 4))
        self._positions: list[int] = []
        self._targets: list[int] = []
        self._tops: list[int] = []
        self._owners: list[RequestId] = []
        self._entries: list[TokenLogprobs] = []
        #: Per index of a chunk that asks, how many of its positions predict a prompt token.
        self._counts: dict[int, int] = {}
        #: Requests with logits that are not finite.
        self.unsound: set[RequestId] = set()
        for i, chunk in enumerate(chunks):
            if not chunk.scores_prompt:
                continue
            targets = chunk.prompt_ids[chunk.start + 1 : chunk.start + 1 + len(chunk.token_ids)]
            first = last_tokens[i] - len(chunk.token_ids) + 1
            count = self._counts[i] = len(targets)
            self._positions += range(first, first + count)
            self._targets += targets
            self._tops += [min(chunk.sampling.prompt_logprobs or 0, max_top)] * count
            self._owners += [chunk.request_id] * count

    @property
    def pieces(self) -> list[list[int]]:
        """Positions in the flattened row, as many at once as there is memory for."""
        starts = range(0, len(self._positions), self._length)
        return [self._positions[begin : begin + self._length] for begin in starts]

    def score(self, logits: Tensor) -> None:
        """Take the logits of the next piece: ``[n, vocabulary]``, any floating dtype."""
        begin = len(self._entries)
        here = slice(begin, begin + len(logits))
        tops, targets = self._tops[here], self._targets[here]
        scores = Scores(logits.float(), max(tops))
        answer = scores.answer(to_device(targets, logits.device))
        *rows, fine = to_host(torch.cat((answer, scores.finite[:, None].double()), dim=1).T)
        self._entries += scores.read(list(zip(*rows, strict=True)), targets, tops)
        owners = self._owners[here]
        self.unsound.update(o for o, good in zip(owners, fine, strict=True) if not good)

    def result(self) -> dict[int, tuple[TokenLogprobs, ...]]:
        """By index of a chunk that asks: one entry per prompt token that it predicts."""
        entries = iter(self._entries)
        return {i: tuple(next(entries) for _ in range(n)) for i, n in self._counts.items()}
