"""The final record: all that is left of a request when its scope has closed."""

from __future__ import annotations

import attrs

from triolet.core import RequestId
from triolet.output.events import Usage


@attrs.frozen
class RequestRecord:
    """What a request was and how it ended. Written once, whatever the end.

    A request that was never admitted has a record too, without tokens.

    Times are nanoseconds of one monotonic clock; ``None`` where the stage was never reached.
    """

    id: RequestId
    #: ``finished``, ``rejected``, ``failed``, or ``cancelled:<cause>``.
    outcome: str
    usage: Usage
    received_ns: int
    ended_ns: int
    admitted_ns: int | None = None
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
