"""When a slow reader pauses its own request, and when the request goes on.

Rules:

1. Reaching the bound pauses: the engine generates nothing more for this request.
2. Falling below half of the bound resumes.
3. In between everything stays as it is. Without this gap a reader at the bound would pause and
   resume the request with every write.
"""

from __future__ import annotations

from enum import Enum


class Decision(Enum):
    """What to do with the request now."""

    KEEP = "keep"
    PAUSE = "pause"
    RESUME = "resume"


def decide(undelivered_bytes: int, paused: bool, limit_bytes: int) -> Decision:
    """Hold one stream to its bound.

    Args:
        undelivered_bytes: As :attr:`triolet.stream.log.StreamLog.undelivered_bytes` counts.
        paused: Whether an earlier decision was ``PAUSE``, with no ``RESUME`` since.
        limit_bytes: The bound, at least 1.
    """
    if not paused and undelivered_bytes >= limit_bytes:
        return Decision.PAUSE
    if paused and 2 * undelivered_bytes < limit_bytes:
        return Decision.RESUME
    return Decision.KEEP
