"""When a slow reader pauses its own request, and when the request goes on.

Rules:

1. Reaching a bound pauses: the engine generates nothing more for this request.
2. Falling below half of every bound resumes.
3. In between everything stays as it is. Without this gap a reader at the bound would pause and
   resume the request with every write.

There are two bounds. Bytes are what a stuck client costs in memory. Tokens are what it costs in
computing: joined text is so compact that the bound in bytes alone would have the engine work on
for minutes for somebody who reads nothing.
"""

from __future__ import annotations

from enum import Enum

import attrs


@attrs.frozen
class Undelivered:
    """Output that the client has not taken, or as much of it as there may be."""

    #: As :attr:`triolet.stream.log.StreamLog.undelivered_bytes` counts.
    bytes: int
    tokens: int

    def reaches(self, share: float, limit: Undelivered) -> bool:
        """Whether either is at least that share of the limit."""
        return self.bytes >= share * limit.bytes or self.tokens >= share * limit.tokens


class Decision(Enum):
    """What to do with the request now."""

    KEEP = "keep"
    PAUSE = "pause"
    RESUME = "resume"


def decide(undelivered: Undelivered, limit: Undelivered, *, paused: bool) -> Decision:
    """Hold one stream to its bound.

    Args:
        undelivered: As of now.
        limit: The bound, both numbers at least 1.
        paused: Whether an earlier decision was ``PAUSE``, with no ``RESUME`` since.
    """
    if not paused and undelivered.reaches(1, limit):
        return Decision.PAUSE
    if paused and not undelivered.reaches(0.5, limit):
        return Decision.RESUME
    return Decision.KEEP
