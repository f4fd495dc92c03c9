"""Hypercorn's protocol code, with the gaps in its HTTP/2 closed that a token stream falls into.

HTTP/1.1 and WebSocket are nearly used as they are. An HTTP/1.1 response that the app leaves
unfinished already ends as it must: the connection closes without the terminating chunk. A
WebSocket handshake that Hypercorn itself refuses is ended on both sides, see :func:`refused`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, TypeGuard

import h2.errors
import h2.events
import h2.exceptions
import h11
import trio.lowlevel
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.events import EndBody, StreamClosed, Trailers
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import H2CProtocolRequiredError, H2ProtocolAssumedError, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.protocol.ws_stream import WSStream
from priority.priority import MissingStreamError

if TYPE_CHECKING:
    from hypercorn.protocol.events import Event as StreamEvent

#: The close code of a WebSocket that ended without a close frame (RFC 6455, 7.4.1).
ABNORMAL_CLOSURE = 1006


def refused(stream: HTTPStream | WSStream | None) -> TypeGuard[WSStream]:
    """Whether Hypercorn itself has answered this WebSocket handshake with an error.

    It then counts the stream as closed, but neither removes it nor tells an app that it had
    started already: connection and app would wait for ever.
    """
    return isinstance(stream, WSStream) and stream.closed


async def dismiss(stream: WSStream) -> None:
    """Tell the app of a refused WebSocket that it is over."""
    if stream.app_put is None:
        await trio.lowlevel.checkpoint()
    else:
        await stream.app_put({"type": "websocket.disconnect", "code": ABNORMAL_CLOSURE})


class Http2(H2Protocol):
    """Hypercorn's HTTP/2 with three gaps closed.

    A response the app leaves unfinished is reset instead of left dangling; body data for a
    response that is already over is acknowledged instead of raising ``KeyError``; senders
    blocked on flow control wake when the connection closes.
    """

    def __init__(self, wrapper: ProtocolWrapper) -> None:
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
        self._ended: set[int] = set()

    async def stream_send(self, event: StreamEvent) -> None:
        """Take one event of a response, as Hypercorn does, and reset an unfinished one."""
        if isinstance(event, (EndBody, Trailers)):
            self._ended.add(event.stream_id)
        elif isinstance(event, StreamClosed):
            ended = event.stream_id in self._ended
            self._ended.discard(event.stream_id)
            if not ended and isinstance(self.streams.get(event.stream_id), HTTPStream):
                await self._reset(event.stream_id)
        await super().stream_send(event)

    async def _reset(self, stream_id: int) -> None:
        """Reset a stream after what the app had already sent, an error event perhaps."""
        await trio.lowlevel.checkpoint()
        try:
            buffer = self.stream_buffers[stream_id]
            if buffer.buffer:
                await buffer.drain()
            self.connection.reset_stream(stream_id, h2.errors.ErrorCodes.INTERNAL_ERROR)
            await self._flush()
            # The sending task finds the stream gone and removes buffer and priority itself;
            # taking them from under it would end the whole connection.
            await buffer.close()
            self.priority.unblock(stream_id)
            await self.has_data.set()
        except (KeyError, MissingStreamError, h2.exceptions.ProtocolError):
            pass  # the client reset the stream or went away meanwhile: nothing to reset

    async def handle(self, event: Event) -> None:
        """Take bytes or the end of the connection, as Hypercorn does, and wake senders at it."""
        await super().handle(event)
        if isinstance(event, Closed):
            for buffer in list(self.stream_buffers.values()):
                await buffer.close()

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        await trio.lowlevel.checkpoint()
        for event in events:
            if isinstance(event, h2.events.DataReceived) and event.stream_id not in self.streams:
                with suppress(h2.exceptions.ProtocolError):
                    self.connection.acknowledge_received_data(
                        event.flow_controlled_length, event.stream_id
                    )
                await self._flush()
            else:
                await super()._handle_events([event])
                stream = self.streams.get(getattr(event, "stream_id", 0) or 0)
                if refused(stream):
                    del self.streams[stream.stream_id]
                    await dismiss(stream)


class Protocol(ProtocolWrapper):
    """Hypercorn's choice between HTTP/1.1 and HTTP/2, made with our HTTP/2."""

    protocol: H11Protocol | H2Protocol

    def start_http2(self) -> H2Protocol:
        """Switch to HTTP/2; the caller initiates it."""
        self.protocol = Http2(self)
        return self.protocol

    async def handle(self, event: Event) -> None:
        """Take bytes or the end of the connection; HTTP/1.1 may turn into HTTP/2 by it."""
        try:
            await self.protocol.handle(event)
            if isinstance(self.protocol, H11Protocol) and refused(self.protocol.stream):
                stream, self.protocol.stream = self.protocol.stream, None
                await dismiss(stream)
                await self.send(Closed())
        except H2ProtocolAssumedError as prior_knowledge:
            await self.start_http2().initiate()
            rest = prior_knowledge.data
        except H2CProtocolRequiredError as upgrade:
            await self.start_http2().initiate(upgrade.headers, upgrade.settings)
            rest = upgrade.data
        else:
            return
        if rest:
            await self.protocol.handle(RawData(rest))

    def awaits_body(self) -> bool:
        """Whether an HTTP/1.1 client has sent a part of a request and owes the rest."""
        return (
            isinstance(self.protocol, H11Protocol)
            and self.protocol.connection.their_state is h11.SEND_BODY
        )
