"""Who may come in: a bound on live requests, and an honest word on when to try again. Pure."""

from __future__ import annotations

import math
from collections import deque

import attrs

from triolet.errors import QueueFullError

#: Ends that the drain rate is measured over: enough to smooth, few enough to follow the load.
RATE_WINDOW_REQUESTS = 32
#: Bounds of ``Retry-After``. Clients treat more than two minutes as "do not retry at all".
RETRY_AFTER_MIN_S, RETRY_AFTER_MAX_S = 1.0, 60.0


@attrs.define
class Admission:
    """Bounds the number of live requests: those the engine runs and those that wait for it."""

    max_live: int
    live: int = attrs.field(default=0, init=False)
    _ended_s: deque[float] = attrs.field(
        factory=lambda: deque[float](maxlen=RATE_WINDOW_REQUESTS), init=False
    )

    def enter(self, now_s: float, places: int = 1) -> None:
        """Count one more request, or so many.

        Raises:
            QueueFullError: As many are live as may be; says when to come back.
        """
        if self.live + places > self.max_live:
            raise QueueFullError(
                f"The server holds {self.live} requests and takes no more for now; "
                "try again after the time in Retry-After.",
                retry_after_s=self.retry_after_s(now_s),
            )
        self.live += places

    def leave(self, now_s: float, places: int = 1) -> None:
        """Count one request less, or so many."""
        self.live -= places
        self._ended_s.append(now_s)

    def retry_after_s(self, now_s: float) -> float:
        """Seconds until a place is free, by the rate at which requests ended last."""
        ends = len(self._ended_s) - 1
        if ends < 1 or now_s - self._ended_s[-1] > RETRY_AFTER_MAX_S:
            # Nothing to go by, or nothing that still says anything.
            return RETRY_AFTER_MIN_S
        per_request_s = (self._ended_s[-1] - self._ended_s[0]) / ends
        return min(max(math.ceil(per_request_s), RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)
