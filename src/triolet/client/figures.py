"""From what clients saw to figures. Pure; ``docs/reference/bench.md`` defines each of them.

- TTFT, ITL, TPOT and end-to-end are four different things and are kept apart.
- Whoever got a first token counts in TTFT and ITL, however the request ended: leaving out those
  that failed would make a server look better the more of them it fails. TPOT and end-to-end are
  of requests that completed.
- All tokens that arrived count in the throughput.
- Times are seconds after the run began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import attrs

#: Ended by ``[DONE]``.
COMPLETED = "completed"
#: Every choice had a finish reason and the body was complete, yet no ``[DONE]`` came.
UNMARKED = "completed, no [DONE]"
#: The client itself ended it.
CANCELLED = "cancelled"


@attrs.frozen
class RequestResult:
    """What one client saw of one request."""

    number: int
    #: When it was to be sent. In a closed loop that is when it was sent.
    intended_s: float
    sent_s: float
    ended_s: float
    #: :data:`COMPLETED`, :data:`UNMARKED`, :data:`CANCELLED`, or a class of failure such as
    #: ``truncated``, ``error:engine_error`` or ``refused:429:queue_full``.
    end: str
    #: When each event came that shows a token.
    arrivals_s: tuple[float, ...] = ()
    #: Reads that such events were completed in.
    writes: int = 0
    bytes_read: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    #: By the server's usage; ``None`` where it gave none.
    output_tokens: int | None = None
    finish_reason: str | None = None
    request_id: str | None = None
    #: What a failure said.
    detail: str = ""

    @property
    def completed(self) -> bool:
        """Whether the whole answer came."""
        return self.end in {COMPLETED, UNMARKED}

    @property
    def tokens(self) -> int:
        """Output tokens: of the usage, else the events that show one."""
        return len(self.arrivals_s) if self.output_tokens is None else self.output_tokens

    @property
    def ttft_s(self) -> float | None:
        """From when it was to be sent to its first visible token."""
        return self.arrivals_s[0] - self.intended_s if self.arrivals_s else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between events that show a token: one fewer than there are of them."""
        return tuple(later - earlier for earlier, later in pairwise(self.arrivals_s))

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; ``None`` below two tokens."""
        if not self.completed or not self.arrivals_s or self.tokens < 2:  # noqa: PLR2004 - two
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.tokens - 1)

    @property
    def end_to_end_s(self) -> float | None:
        """From when it was to be sent to its end; ``None`` unless it completed."""
        return self.ended_s - self.intended_s if self.completed else None


@attrs.frozen
class Spread:
    """A distribution. All values but ``samples`` in the unit of the samples."""

    samples: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@attrs.frozen
class Figures:
    """All that a run says."""

    #: Seconds from the first intended start to the last end.
    duration_s: float
    requests: int
    completed: int
    #: How many requests ended how, those that completed included.
    ends: Mapping[str, int]
    #: Requests that never showed a token.
    silent: int
    #: Of all requests, as far as they were told or seen.
    output_tokens: int
    prompt_tokens: int
    #: Per completed request.
    mean_prompt_tokens: float
    mean_cached_tokens: float
    mean_output_tokens: float
    #: Completed requests whose tokens had to be counted by their events.
    counted_by_events: int
    #: Per second of the whole run.
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    #: Requests in flight, over the time of the run.
    mean_concurrency: float
    #: Of completed requests.
    tokens_per_event: float
    tokens_per_write: float
    bytes_per_write: float
    ttft_s: Spread | None
    itl_s: Spread | None
    tpot_s: Spread | None
    end_to_end_s: Spread | None
    #: How much later than intended requests were sent: the client's lateness, and the wait for
    #: a slot where the load has a limit.
    send_lag_s: Spread | None


def figure(results: Sequence[RequestResult]) -> Figures:
    """Fold the results of a run."""
    done = [result for result in results if result.completed]
    began = min((result.intended_s for result in results), default=0.0)
    duration_s = max((result.ended_s for result in results), default=0.0) - began
    output = sum(result.tokens for result in results)
    prompt = sum(result.prompt_tokens or 0 for result in results)
    in_flight_s = sum(result.ended_s - result.sent_s for result in results)
    done_tokens = sum(result.tokens for result in done)
    writes = sum(result.writes for result in done)
    return Figures(
        duration_s=duration_s,
        requests=len(results),
        completed=len(done),
        ends=dict(Counter(result.end for result in results).most_common()),
        silent=sum(not result.arrivals_s for result in results),
        output_tokens=output,
        prompt_tokens=prompt,
        mean_prompt_tokens=_ratio(sum(result.prompt_tokens or 0 for result in done), len(done)),
        mean_cached_tokens=_ratio(sum(result.cached_tokens or 0 for result in done), len(done)),
        mean_output_tokens=_ratio(done_tokens, len(done)),
        counted_by_events=sum(result.output_tokens is None for result in done),
        output_tokens_per_s=_ratio(output, duration_s),
        total_tokens_per_s=_ratio(output + prompt, duration_s),
        requests_per_s=_ratio(len(done), duration_s),
        mean_concurrency=_ratio(in_flight_s, duration_s),
        tokens_per_event=_ratio(done_tokens, sum(len(result.arrivals_s) for result in done)),
        tokens_per_write=_ratio(done_tokens, writes),
        bytes_per_write=_ratio(sum(result.bytes_read for result in done), writes),
        ttft_s=spread(result.ttft_s for result in results),
        itl_s=spread(gap for result in results for gap in result.gaps_s),
        tpot_s=spread(result.tpot_s for result in results),
        end_to_end_s=spread(result.end_to_end_s for result in results),
        send_lag_s=spread(result.sent_s - result.intended_s for result in results),
    )


def spread(samples: Iterable[float | None]) -> Spread | None:
    """The distribution of samples, those that are ``None`` left out; ``None`` without any."""
    ranked = sorted(sample for sample in samples if sample is not None)
    if not ranked:
        return None
    return Spread(
        samples=len(ranked),
        # A mean of equal floats may differ from them in the last digit; no mean is outside.
        mean=min(max(sum(ranked) / len(ranked), ranked[0]), ranked[-1]),
        p50=percentile(ranked, 50),
        p90=percentile(ranked, 90),
        p99=percentile(ranked, 99),
        max=ranked[-1],
    )


def percentile(ranked: Sequence[float], percent: float) -> float:
    """The value below which so many percent of the samples lie.

    Between two samples it is interpolated linearly, as numpy and the other tools do (Hyndman and
    Fan 1996, definition 7).

    Args:
        ranked: At least one sample, in ascending order.
        percent: From 0 to 100.
    """
    place = (len(ranked) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ranked) - 1)
    share = place - below
    return min(ranked[above], ranked[below] + (ranked[above] - ranked[below]) * share)


def _ratio(amount: float, by: float) -> float:
    return amount / by if by > 0 else 0.0
