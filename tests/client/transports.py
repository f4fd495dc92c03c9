"""Servers without sockets, for the client: one of ASGI messages, one of raw pieces."""

from __future__ import annotations

import attrs
import httpx2
import trio

EVENT_STREAM = {"content-type": "text/event-stream"}


class AsgiBody(httpx2.AsyncByteStream):
    def __init__(self, exchange):
        self.exchange = exchange

    async def __aiter__(self):  # noqa: ASYNC900 - the protocol of httpx2's bodies
        while True:
            try:
                message = await self.exchange.next_message()
            except trio.EndOfChannel:
                raise httpx2.RemoteProtocolError("incomplete chunked read") from None
            except trio.ClosedResourceError:
                raise httpx2.ReadError("closed") from None
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body", False):
                return

    async def aclose(self):
        self.exchange.disconnect()
        await trio.lowlevel.checkpoint()


@attrs.frozen
class AsgiTransport(httpx2.AsyncBaseTransport):
    """Carries requests to an :class:`triolet.testing.asgi.AsgiClient`."""

    client: object

    async def handle_async_request(self, request):
        exchange = self.client.start(
            request.method,
            request.url.raw_path.decode(),
            body=await request.aread(),
            headers=dict(request.headers),
        )
        start = await exchange.next_message()
        return httpx2.Response(start["status"], headers=start["headers"], stream=AsgiBody(exchange))


class Pieces(httpx2.AsyncByteStream):
    """A body of given pieces: bytes are sent, numbers are waited, errors are raised."""

    def __init__(self, pieces, closed):
        self.pieces, self.closed = pieces, closed

    async def __aiter__(self):  # noqa: ASYNC900 - the protocol of httpx2's bodies
        for piece in self.pieces:
            await trio.lowlevel.checkpoint()
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, bytes):
                yield piece
            else:
                await trio.sleep(piece)

    async def aclose(self):
        self.closed.append(True)
        await trio.lowlevel.checkpoint()


@attrs.define(eq=False)
class PiecesTransport(httpx2.AsyncBaseTransport):
    """Answers every request with the same status, headers and pieces."""

    pieces: list = attrs.field(factory=list)
    status: int = 200
    headers: dict = attrs.field(factory=lambda: dict(EVENT_STREAM))
    #: Raised in place of an answer.
    error: Exception | None = None
    requests: list = attrs.field(factory=list)
    closed: list = attrs.field(factory=list)

    async def handle_async_request(self, request):
        await trio.lowlevel.checkpoint()
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        return httpx2.Response(
            self.status, headers=self.headers, stream=Pieces(self.pieces, self.closed)
        )
