"""The final record: all that is left of a request when its scope has closed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs

from triolet.core import RequestId
from triolet.observe.logs import REQUEST_LOGGER
from triolet.output.events import Usage

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)
request_logger = logging.getLogger(REQUEST_LOGGER)


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


def write(record: RequestRecord, books: Callable[[RequestRecord], None]) -> None:
    """Say a request's end in the log and to whoever keeps the books, which may not raise."""
    request_logger.info(
        "%s %s: %d prompt tokens, %d output tokens, %.3f s",
        record.id,
        record.outcome,
        record.usage.prompt_tokens,
        record.usage.output_tokens,
        (record.ended_ns - record.received_ns) / 1e9,
    )
    try:
        books(record)
    except Exception:
        # Whoever keeps the books must not end other people's requests.
        logger.exception("the record of %s could not be written", record.id)
