"""A raw client of :mod:`triolet.testing.wire`: it sends bytes and reads when it is told to.

Reading understands HTTP/1.1 and Server-Sent Events. For HTTP/2 and WebSocket, have h2 or wsproto
drive :attr:`WireClient.stream`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs
import h11
import trio
import trio.lowlevel

from triolet.server.deadline_stream import ConnectionRecord
from triolet.testing.asgi import AsgiResponse
from triolet.testing.streams import FaultyStream
from triolet.wire.sse import SseDecoder, SseEvent

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Bytes that a client reads at once unless told otherwise.
READ_BYTES = 65_536


@attrs.define(eq=False)
class _Reading:
    """A response that is being read."""

    parser: h11.Connection
    sse: SseDecoder = attrs.field(factory=SseDecoder)
    events: list[SseEvent] = attrs.field(factory=list)
    status: int = 0
    headers: dict[str, str] = attrs.field(factory=dict)
    body: bytearray = attrs.field(factory=bytearray)
    over: bool = False
    complete: bool = False
    #: The connection has ended.
    ended: bool = False


@attrs.define(eq=False)
class WireClient:
    """One client's end of a connection: raw, and it reads nothing unless told to."""

    #: For libraries that speak a protocol themselves, such as h2 and wsproto.
    stream: FaultyStream
    #: Why the server ended the connection, if it did.
    record: ConnectionRecord
    _rest: bytes = attrs.field(default=b"", init=False)
    _reading: _Reading | None = attrs.field(default=None, init=False)

    async def send(self, data: bytes) -> None:
        """Send raw bytes.

        Raises:
            trio.BrokenResourceError: The server has gone.
        """
        await self.stream.send_all(data)

    async def request(
        self,
        method: str,
        path: str,
        *,
        json_body: object = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send an HTTP/1.1 request."""
        await self.send(http_request(method, path, json_body=json_body, body=body, headers=headers))

    async def receive(self, max_bytes: int = READ_BYTES) -> bytes:
        """The next raw bytes, at most so many; none at the end of the connection.

        Raises:
            trio.BrokenResourceError: The connection was reset.
        """
        if self._rest:
            data, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
            await trio.lowlevel.checkpoint()
            return data
        return bytes(await self.stream.receive_some(max_bytes))

    async def read_head(self) -> tuple[int, Mapping[str, str]]:
        """Status and headers, by lower-case name, of the response that comes next or has begun.

        Raises:
            trio.EndOfChannel: The connection ended before them.
            trio.BrokenResourceError: It was reset before them.
        """
        reading = await self._begun()
        return reading.status, reading.headers

    async def next_event(self) -> SseEvent:
        """The next Server-Sent Event of the response.

        Raises:
            trio.EndOfChannel: The response is over, whole or not; see :meth:`read_response`.
        """
        reading = await self._begun()
        while not reading.events:
            if reading.over:
                raise trio.EndOfChannel
            await self._advance(reading)
        return reading.events.pop(0)

    async def read_response(self) -> AsgiResponse:
        """The whole of the response, what was read of it before included.

        One that ends in a reset, or before its end, is not ``complete``.

        Raises:
            trio.EndOfChannel: The connection ended before it began.
            trio.BrokenResourceError: It was reset before it began.
        """
        reading = await self._begun()
        while not reading.over:
            await self._advance(reading)
        self._reading = None
        return AsgiResponse(reading.status, reading.headers, bytes(reading.body), reading.complete)

    async def half_close(self) -> None:
        """Send the end of our direction, and go on reading."""
        await self.stream.send_eof()

    def leave(self) -> None:
        """Close the connection as a client does that leaves in good order; at once."""
        self.stream.close()

    def reset(self) -> None:
        """Close it with a reset, as a client does that leaves with bytes unread; at once."""
        self.stream.reset()

    async def _begun(self) -> _Reading:
        await trio.lowlevel.checkpoint()
        if self._reading is None:
            parser = h11.Connection(h11.CLIENT)
            # h11 reads a response only after it has seen a request; which one does not matter.
            parser.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
            parser.send(h11.EndOfMessage())
            if self._rest:
                parser.receive_data(self._rest)
                self._rest = b""
            self._reading = _Reading(parser)
        while self._reading.status == 0:
            event = await self._next(self._reading)
            if event is None:
                self._reading = None
                raise trio.EndOfChannel
            if isinstance(event, h11.Response):
                self._reading.status = event.status_code
                self._reading.headers = {k.decode(): v.decode() for k, v in event.headers}
        return self._reading

    async def _advance(self, reading: _Reading) -> None:  # noqa: ASYNC910 - _next() has one
        try:
            event = await self._next(reading)
        except trio.BrokenResourceError:
            event = None
        match event:
            case h11.Data():
                reading.body += event.data
                reading.events += reading.sse.feed(bytes(event.data))
            case h11.EndOfMessage():
                reading.over = reading.complete = True
                self._rest = bytes(reading.parser.trailing_data[0])
            case _:
                reading.over = True

    async def _next(self, reading: _Reading) -> object:
        """The next event of a response; ``None`` if the connection ends first."""
        await trio.lowlevel.checkpoint()
        try:
            while (event := reading.parser.next_event()) is h11.NEED_DATA:
                data = await self.stream.receive_some(READ_BYTES)
                reading.ended = not data
                reading.parser.receive_data(bytes(data))
        except h11.RemoteProtocolError:
            if reading.ended:
                return None
            raise
        return event


def http_request(
    method: str,
    path: str,
    *,
    json_body: object = None,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """The bytes of an HTTP/1.1 request, to be sent whole or in pieces."""
    lines = {"host": "triolet.test", **{k.lower(): v for k, v in (headers or {}).items()}}
    if json_body is not None:
        body = json.dumps(json_body).encode()
        lines.setdefault("content-type", "application/json")
    if body is not None:
        lines.setdefault("content-length", str(len(body)))
    head = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items())]
    return "\r\n".join([*head, "", ""]).encode() + (body or b"")
