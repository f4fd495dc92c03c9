"""How likely the model itself finds tokens: log-probabilities, ranks, the k most likely ids.

Theory of operation. The log-softmax of a row is never formed: a row costs one sum of its
exponentials, one search for its largest logits and one count of those above the token's, and a
few subtractions. Everything the host must know goes there in one tensor, which a caller may send
along with its own.

Rule 1. Of the raw logits: before temperature, penalties, masks and cuts (as vLLM's default,
"raw_logprobs", has it).
Rule 2. The k most likely are exact, ties by id. Where so many logits tie with the k-th that they
could reach beyond the ones looked at, that one row is sorted.
Rule 3. Exponentials are summed in float64, for the reason the sampler does: nothing depends on
the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from triolet.core import TokenLogprobs
from triolet.engine.ranking import largest
from triolet.engine.transfer import to_host

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

#: Most likely ids that a request may ask for, by default: OpenAI's limit of ``top_logprobs``.
DEFAULT_MAX_LOGPROBS: Final = 20
#: Logits looked at beyond the k-th. In bfloat16, logits at 16 are 1/8 apart and a dozen tie.
_TIE_MARGIN: Final = 64
#: Columns that every row of the answer begins with: log-probability, rank, whether to sort.
_HEAD: Final = 3


class Scores:
    """The distributions of some rows. Holds on to the logits, which must not change meanwhile.

    Args:
        logits: float32 ``[n, vocabulary]``.
        top: Most likely ids to find at most; more than the vocabulary means all of it.
    """

    def __init__(self, logits: Tensor, top: int) -> None:
        vocabulary = logits.shape[-1]
        self._logits = logits
        self._top = min(top, vocabulary)
        best = logits.amax(-1, keepdim=True)
        mass = (logits - best).exp_().sum(-1, keepdim=True, dtype=torch.float64)
        self._log_mass = best.double() + mass.log()
        self._open = torch.zeros_like(mass)
        if self._top:
            count = min(self._top + _TIE_MARGIN, vocabulary)
            self._values, self._ids = largest(logits, count)
            if count < vocabulary:
                edge = self._values[:, self._top - 1 : self._top] <= self._values[:, -1:]
                self._open = edge.double()

    @property
    def finite(self) -> Tensor:
        """Rows that are sound: bool ``[n]``. Minus infinity is, it means impossible; NaN is not."""
        return self._log_mass.isfinite().squeeze(1)

    @property
    def width(self) -> int:
        """Columns of :meth:`answer`."""
        return _HEAD + 2 * self._top

    def answer(self, targets: Tensor) -> Tensor:
        """What :meth:`read` needs: float64 ``[n, width]``, on the device of the logits.

        Args:
            targets: int64 ``[n]``, the token of each row.
        """
        value = self._logits.gather(1, targets[:, None])
        above = (self._logits > value).sum(-1, dtype=torch.int32)
        columns = [value.double() - self._log_mass, above[:, None] + 1.0, self._open]
        if self._top:
            # Ids are exact in float64.
            columns += [
                self._values[:, : self._top].double() - self._log_mass,
                self._ids[:, : self._top].double(),
            ]
        return torch.cat(columns, dim=1)

    def read(
        self, answer: Sequence[Sequence[float]], targets: Iterable[int], tops: Sequence[int]
    ) -> list[TokenLogprobs]:
        """The entries of all rows.

        Args:
            answer: That of :meth:`answer`, on the host.
            targets: The same tokens again.
            tops: How many of the most likely ids each row reports, as far as there are.

        Returns:
            One entry per row. A log-probability is minus infinity where the model's logit is.
        """
        entries = []
        for i, (row, token, wanted) in enumerate(zip(answer, targets, tops, strict=True)):
            k = min(wanted, self._top)
            logprob, rank, open_end = row[:_HEAD]
            if not k:
                top: tuple[tuple[int, float], ...] = ()
            elif open_end:
                top = self._sorted(i, k)
            else:
                ids = row[_HEAD + self._top : _HEAD + self._top + k]
                top = tuple(zip(map(int, ids), row[_HEAD : _HEAD + k], strict=True))
            entries.append(TokenLogprobs(token, logprob, int(rank), top))
        return entries

    def _sorted(self, row: int, k: int) -> tuple[tuple[int, float], ...]:
        values, ids = largest(self._logits[row : row + 1], self._logits.shape[-1])
        logprobs = to_host(values[0, :k].double() - self._log_mass[row])
        return tuple(zip(to_host(ids[0, :k]), logprobs, strict=True))
