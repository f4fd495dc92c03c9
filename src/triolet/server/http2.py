"""Hypercorn's HTTP/2, with the gaps closed that a token stream falls into.

Hypercorn keeps what a stream's flow-control window does not let out in a buffer of the stream,
and a task of the connection sends from all buffers in turn. A client that reads its socket but
opens no window is invisible to the socket's deadline. The rules:

1. The app's send returns once at most :data:`HIGH_WATER_BYTES` of its stream are unsent.
   (Hypercorn's own limit is lifted by any attempt to send, also by one that sends nothing.)
2. A stream whose window stays closed for ``send_timeout_s`` while something waits for it is
   reset, and its app gets ``http.disconnect`` with ``SLOW_CLIENT`` in its record. A stream
   whose window is open waits for the socket, which has a deadline of its own.
3. A response that the app leaves unfinished is reset, after the text already sent.
4. A request body that brings no byte for the read timeout has its stream reset.
5. A malformed request, or data for a response that is over, concerns its stream alone.
6. Senders blocked on flow control wake when the connection closes.
7. A frame longer than allowed ends the connection with its header. (h2 would collect it first:
   16 MiB of a client's choice.)
"""

from __future__ import annotations

from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

import attrs
import h2.errors
import h2.events
import h2.exceptions
import trio
import trio.lowlevel
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import (
    Body,
    Data,
    EndBody,
    EndData,
    Response,
    StreamClosed,
    Trailers,
)
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import ConnectionState
from priority.priority import MissingStreamError

from triolet.core import CancelCause
from triolet.server.deadline_stream import RECORD_KEY, ConnectionRecord, StreamRecord
from triolet.server.refusal import dismiss, explained, refused

if TYPE_CHECKING:
    from hypercorn.protocol import ProtocolWrapper
    from hypercorn.protocol.events import Event as StreamEvent

#: Bytes of one stream that may wait for its window before the app's send does. The window that
#: most clients begin with (RFC 9113, 6.9.2), so a client that opens it again and again never
#: finds it empty-handed; and no more than the kernel may hold of an HTTP/1.1 response.
HIGH_WATER_BYTES = 65_536


#: What a client's side of a connection begins with, before its first frame (RFC 9113, 3.4).
_PREFACE_BYTES = 24
#: The header of a frame, and its length in there (RFC 9113, 4.1).
_HEADER_BYTES, _LENGTH_BYTES = 9, 3


@attrs.frozen
class Limits:
    """What one client may cost in time, and whom to tell. Seconds."""

    send_timeout_s: float
    read_timeout_s: float
    record: ConnectionRecord


@attrs.define
class FrameLengths:
    """Finds the lengths of frames in the bytes from a client, wherever these are cut."""

    limit_bytes: int
    #: Bytes before the next header.
    _skip: int = attrs.field(default=_PREFACE_BYTES, init=False)
    #: A header of which the rest is still to come.
    _header: bytes = attrs.field(default=b"", init=False)

    def allow(self, data: bytes) -> bool:
        """Take the next bytes; ``False`` once there is a frame over the limit."""
        at = 0
        while at + self._skip < len(data):
            at += self._skip
            rest = _HEADER_BYTES - len(self._header)
            self._header += data[at : at + rest]
            at, self._skip = at + rest, 0
            if len(self._header) == _HEADER_BYTES:
                self._skip = int.from_bytes(self._header[:_LENGTH_BYTES])
                if self._skip > self.limit_bytes:
                    return False
                self._header = b""
        self._skip -= max(0, len(data) - at)
        return True


class Http2(H2Protocol):
    """One HTTP/2 connection."""

    def __init__(self, wrapper: ProtocolWrapper, limits: Limits) -> None:
        super().__init__(
            wrapper.app,
            wrapper.config,
            wrapper.context,
            wrapper.task_group,
            wrapper.state,
            wrapper.ssl,
            wrapper.client,
            wrapper.server,
            wrapper.send,
        )
        self._limits = limits
        self._lengths = FrameLengths(self.connection.max_inbound_frame_size)
        self._records: dict[int, StreamRecord] = {}
        #: Streams whose response is complete as far as the app is concerned.
        self._ended: set[int] = set()
        #: When to give up the rest of a request body: Trio's time, by stream.
        self._body_due: dict[int, float] = {}

    # Responses

    async def stream_send(self, event: StreamEvent) -> None:  # noqa: ASYNC910 (see PacedApp)
        """Take one event of a response; return when there is room for the next."""
        stream_id = event.stream_id
        if isinstance(event, (EndBody, EndData)):
            await self._end(stream_id)
            return
        if isinstance(event, Trailers):
            self._ended.add(stream_id)
            await self._drain(stream_id)
        elif isinstance(event, StreamClosed):
            await self._leave(stream_id)
        elif isinstance(event, Response):
            for part in explained(event, self.streams.get(stream_id)) or (event,):
                await super().stream_send(part)
            return  # noqa: ASYNC910 (see PacedApp)
        await super().stream_send(event)
        if isinstance(event, (Body, Data)):
            buffer = self.stream_buffers.get(stream_id)
            if buffer is not None and len(buffer.buffer) > HIGH_WATER_BYTES:
                await self._drain(stream_id)

    async def _end(self, stream_id: int) -> None:
        self._ended.add(stream_id)
        buffer = self.stream_buffers.get(stream_id)
        if buffer is None:
            await trio.lowlevel.checkpoint()
            return
        buffer.set_complete()
        await self._wake(stream_id)
        if await self._drain(stream_id):
            await buffer.drain()

    async def _leave(self, stream_id: int) -> None:  # noqa: ASYNC910 (super follows)
        """See a stream off that its app has left: reset it, unless its response is complete."""
        ended = stream_id in self._ended
        stream = self.streams.get(stream_id)
        if not ended and isinstance(stream, HTTPStream):
            # The text that went before, an error event perhaps, still reaches the client.
            if await self._drain(stream_id):
                await self._reset(stream_id, h2.errors.ErrorCodes.INTERNAL_ERROR)
        elif not ended and stream is not None:
            # A WebSocket has sent its close frame; its stream ends behind it (RFC 8441, 5).
            await self._end(stream_id)
        elif self._unsent(stream_id):
            # Cancelled in the send that completed the response.
            await self._drain(stream_id)

    async def _drain(self, stream_id: int) -> bool:
        """Wait until all of a stream has been sent; ``False`` if it was reset instead."""
        await trio.lowlevel.checkpoint()
        buffer = self.stream_buffers.get(stream_id)
        while buffer is not None and (unsent := len(buffer.buffer)):
            with trio.move_on_after(self._limits.send_timeout_s) as patience:
                await buffer.drain()
            stuck = patience.cancelled_caught and len(buffer.buffer) == unsent
            if stuck and self._window(stream_id) <= 0:
                if (record := self._records.get(stream_id)) is not None:
                    record.reset_by = CancelCause.SLOW_CLIENT
                await self._cut(stream_id, h2.errors.ErrorCodes.CANCEL)
                return False
        return True

    def _unsent(self, stream_id: int) -> int:
        buffer = self.stream_buffers.get(stream_id)
        return 0 if buffer is None else len(buffer.buffer)

    def _window(self, stream_id: int) -> int:
        """Bytes that the client allows us to send on a stream now; negative if it shrank it."""
        try:
            return self.connection.local_flow_control_window(stream_id)
        except h2.exceptions.ProtocolError:
            return 0  # the stream is over

    async def _wake(self, stream_id: int) -> None:
        with suppress(MissingStreamError):
            self.priority.unblock(stream_id)
        await self.has_data.set()

    async def _reset(self, stream_id: int, code: h2.errors.ErrorCodes) -> None:
        # What fails here fails because the stream or its connection is over already.
        with suppress(h2.exceptions.ProtocolError):
            self.connection.reset_stream(stream_id, code)
        await self._flush()
        if (buffer := self.stream_buffers.get(stream_id)) is not None:
            # The sending task finds the stream gone and removes buffer and priority itself;
            # taking them from under it would end the whole connection.
            await buffer.close()
            await self._wake(stream_id)

    async def _cut(self, stream_id: int, code: h2.errors.ErrorCodes) -> None:
        """Reset a stream and tell its app that it is over."""
        # The app may be in this very send, and cancel itself once it hears: shielded, or the
        # connection would never count as idle. What waits in here waits for the socket.
        with trio.move_on_after(self._limits.send_timeout_s, shield=True):
            await self._reset(stream_id, code)
            await self._close_stream(stream_id)
            await self.send(Updated(idle=self.idle))

    # Requests

    async def handle(self, event: Event) -> None:
        """Take bytes or the end of the connection, as Hypercorn does, and wake senders at it."""
        if isinstance(event, RawData) and not self._lengths.allow(event.data):
            with suppress(h2.exceptions.ProtocolError):
                self.connection.close_connection(h2.errors.ErrorCodes.FRAME_SIZE_ERROR)
            await self._flush()
            await self.send(Closed())
            return
        await super().handle(event)
        if isinstance(event, Closed):
            for buffer in list(self.stream_buffers.values()):
                await buffer.close()

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        await trio.lowlevel.checkpoint()
        for event in events:
            stream_id: int = getattr(event, "stream_id", None) or 0
            if isinstance(event, h2.events.RequestReceived) and not well_formed(event):
                with suppress(h2.exceptions.ProtocolError):
                    self.connection.reset_stream(stream_id, h2.errors.ErrorCodes.PROTOCOL_ERROR)
                await self._flush()
            elif isinstance(event, h2.events.DataReceived) and stream_id not in self.streams:
                with suppress(h2.exceptions.ProtocolError):
                    self.connection.acknowledge_received_data(
                        event.flow_controlled_length, stream_id
                    )
                await self._flush()
            else:
                await super()._handle_events([event])
                await self._after(event, stream_id)

    async def _after(  # noqa: ASYNC910 (its caller has one)
        self, event: h2.events.Event, stream_id: int
    ) -> None:
        """What an event means for deadlines and for idleness, once Hypercorn has taken it."""
        stream = self.streams.get(stream_id)
        if isinstance(event, (h2.events.RequestReceived, h2.events.DataReceived)):
            if isinstance(stream, HTTPStream):
                self._body_due[stream_id] = trio.current_time() + self._limits.read_timeout_s
        elif isinstance(event, h2.events.StreamEnded):
            self._body_due.pop(stream_id, None)
        elif isinstance(event, h2.events.StreamReset):
            # Hypercorn forgets to; nothing else would end a connection that stays silent now.
            await self.send(Updated(idle=self.idle))
        if refused(stream):
            del self.streams[stream_id]
            await dismiss(stream)
            await self.send(Updated(idle=self.idle))

    async def _create_stream(self, request: h2.events.RequestReceived) -> None:
        assert request.stream_id is not None  # noqa: S101 (h2 types it for events under way)
        record = StreamRecord(self._limits.record)
        # Hypercorn copies it into the request's scope before it waits for anything.
        self.connection_state = ConnectionState({**self.connection_state, RECORD_KEY: record})
        self._records[request.stream_id] = record
        await super()._create_stream(request)

    async def _close_stream(self, stream_id: int) -> None:
        self._ended.discard(stream_id)
        self._body_due.pop(stream_id, None)
        self._records.pop(stream_id, None)
        await super()._close_stream(stream_id)

    def body_due(self) -> float:
        """When the next wait for the rest of a request body is over, in Trio's time."""
        return min(self._body_due.values(), default=inf)

    async def give_up_bodies(self) -> None:
        """Reset the streams whose request body is overdue."""
        await trio.lowlevel.checkpoint()
        now = trio.current_time()
        for stream_id in [one for one, due in self._body_due.items() if due <= now]:
            await self._cut(stream_id, h2.errors.ErrorCodes.CANCEL)


def well_formed(request: h2.events.RequestReceived) -> bool:
    """Whether a request has a method and a path of ASCII, which Hypercorn takes for granted."""
    found = {name: value for name, value in request.headers or () if name.startswith(b":")}
    return all(found.get(name, b"\xff").isascii() for name in (b":method", b":path"))
