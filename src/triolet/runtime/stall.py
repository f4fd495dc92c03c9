"""Whether one engine step hangs, judged by a watcher that trusts only what it saw.

Rules:

1. Each step is judged alone: a new step, or none, starts from nothing.
2. Only time that the watcher saw pass counts: what lies between two looks at the same step, and
   of that at most twice the period at which it meant to look. A process that was stopped with
   all its threads (SIGSTOP, a frozen container, a suspended laptop, a clock that jumped) wakes
   up to one long gap and charges the engine with two periods of it.
3. So a step is never taken for stalled before it has lasted ``timeout_s``, and, by a watcher
   that looks on time, at most two periods later.
"""

from __future__ import annotations

import attrs

#: Seconds between two looks at most: what finding a stall may add to a timeout of a minute, and
#: seldom enough to cost nothing.
LONGEST_PERIOD_S = 1.0
#: Looks within one timeout, so that a short one is kept nearly as exactly as a long one.
LOOKS_PER_TIMEOUT = 8
#: Periods that one gap may count for. More than one, because a busy event loop is late at times;
#: no more than two, because that is all that tells a busy one from a stopped process.
MOST_PERIODS_PER_LOOK = 2


def period_s(timeout_s: float) -> float:
    """How often to look."""
    return min(LONGEST_PERIOD_S, timeout_s / LOOKS_PER_TIMEOUT)


@attrs.frozen
class Watched:
    """What has been seen of the step in flight."""

    looked_s: float
    #: The number of the step, or ``None`` while none is computed.
    step: int | None = None
    #: Seconds for which this step was seen to run.
    seen_s: float = 0.0

    def look(self, now_s: float, step: int | None, *, period_s: float) -> Watched:
        """Look again, at a clock in seconds and at the step that is computed now."""
        if step is None or step != self.step:
            return Watched(now_s, step)
        passed = min(max(0.0, now_s - self.looked_s), MOST_PERIODS_PER_LOOK * period_s)
        return Watched(now_s, step, self.seen_s + passed)

    def stalled(self, timeout_s: float) -> bool:
        """Whether the step has been seen to run for ``timeout_s``."""
        return self.seen_s >= timeout_s
