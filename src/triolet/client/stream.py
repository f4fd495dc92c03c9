"""One stream as it is read: the Trio half of :mod:`triolet.client.classify`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import httpx2
import trio

from triolet.client.classify import Instant, Outcome, StreamClassifier, StreamEvent

if TYPE_CHECKING:
    from triolet.client.chunks import TokenCounts

#: Seconds for the end of a body whose last event has come: it is on its way with it or never
#: comes. Read, it leaves a connection that the next request can use.
SETTLE_TIMEOUT_S = 0.5


def instant() -> Instant:
    """Now."""
    return Instant(trio.current_time(), time.monotonic_ns())


@attrs.define(eq=False)
class TextStream:
    """The events of one answer, in order, each with the time at which it came.

    Iterating ends after ``[DONE]``. A stream that ends otherwise raises after its last event:
    so text that was joined without looking is never taken for a whole answer. Leaving the block
    that opened it closes the connection, and a server that heeds it stops generating.

    A read is a piece of the body as the HTTP library hands it over. In HTTP/1.1 that is one
    chunk, which is what the server wrote at once, unless it is larger than 64 KiB.

    Raises:
        StreamFailedError: From the iteration: the server sent an error event.
        StreamCutError: From the iteration: the bytes ended before the stream did.
    """

    #: Before the request was sent, and before a connection was made for it.
    started: Instant
    #: When the head of the answer was there.
    answered: Instant
    headers: Mapping[str, str] = attrs.field(repr=False)
    _pieces: AsyncIterator[bytes] = attrs.field(repr=False)
    _reader: StreamClassifier = attrs.field(factory=StreamClassifier, init=False, repr=False)
    _ready: deque[StreamEvent] = attrs.field(factory=deque, init=False, repr=False)
    #: When the end of the stream was read; ``None`` before.
    ended: Instant | None = attrs.field(default=None, init=False)

    @property
    def request_id(self) -> str | None:
        """The server's ``X-Request-Id``, else the ``id`` in its events."""
        return self.headers.get("x-request-id") or self._reader.response_id

    @property
    def outcome(self) -> Outcome | None:
        """The verdict; ``None`` while the stream goes on, and for one that was left early."""
        return self._reader.outcome

    @property
    def usage(self) -> TokenCounts | None:
        """The last token counts that came; most servers send them at the end, and if asked."""
        return self._reader.usage

    @property
    def finish_reasons(self) -> Mapping[int, str]:
        """Finish reasons by choice."""
        return self._reader.finish_reasons

    @property
    def reads(self) -> int:
        """How many reads there were."""
        return self._reader.reads

    @property
    def bytes_read(self) -> int:
        """Bytes of the body so far."""
        return self._reader.bytes_read

    @property
    def comments(self) -> int:
        """Comment lines so far: keep-alives."""
        return self._reader.comments

    @property
    def unreadable(self) -> int:
        """Events whose data is no JSON object."""
        return self._reader.unreadable

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self

    async def __anext__(self) -> StreamEvent:
        # Events that came in one read are handed out one by one: a checkpoint for each, so that
        # a consumer that never waits can be cancelled and lets others run.
        await trio.lowlevel.checkpoint()
        while not self._ready:
            if self._reader.outcome is not None:
                failure = self._reader.outcome.failure()
                raise StopAsyncIteration if failure is None else failure
            await self._read()
        return self._ready.popleft()

    async def text(self) -> str:
        """Read to the end and return the text of choice 0.

        Raises:
            BrokenStreamError: It did not end well.
        """
        pieces: list[str] = []
        async for event in self:
            pieces += [delta.text for delta in event.deltas if delta.choice == 0]
        return "".join(pieces)

    async def settle(self) -> None:
        """Read the rest of a body whose last event has come. Done on leaving the block."""
        await trio.lowlevel.checkpoint()
        with (
            trio.move_on_after(SETTLE_TIMEOUT_S),  # noqa: ASYNC912 - each piece is one
            suppress(httpx2.HTTPError),  # the connection is of no more use, and nobody asked
        ):
            async for _ in self._pieces:
                pass

    async def _read(self) -> None:  # noqa: ASYNC910 - anext() waits for bytes
        try:
            piece = await anext(self._pieces)
        except StopAsyncIteration:
            self._reader.end()
        except httpx2.HTTPError as error:
            self._reader.cut(str(error).rstrip(".") or type(error).__name__)
        else:
            self._ready.extend(self._reader.feed(piece, instant()))
        if self._reader.outcome is not None:
            self.ended = instant()
