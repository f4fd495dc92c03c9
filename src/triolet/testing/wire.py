"""A whole server without sockets: protocol code, connections, deadlines, over pipes in memory.

:mod:`triolet.testing.asgi` calls the app; this module puts Triolet's own connections between:
HTTP/1.1, HTTP/2 and WebSocket as the server speaks them, its send deadline, read deadlines and
keep-alive, its bound on connections. What the kernel would hold is a pipe of a known size, so
with a mock clock a client that reads too slowly is cut at the exact second.

Any ASGI app can be served so with :func:`open_wire`; :func:`open_wire_server` serves Triolet's.
The client, :mod:`triolet.testing.wire_client`, does nothing by itself.

What this leaves out of a socket: closing an end with bytes unread does not turn into a reset,
and there is no TLS.
"""

from __future__ import annotations

import errno
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio.worker_context import WorkerContext

from triolet.config import Config
from triolet.runtime.lifecycle import Runtime
from triolet.server.accept import LiveConnections
from triolet.server.connection import AsgiApp, Connection, PacedApp
from triolet.server.deadline_stream import Transport
from triolet.server.listen import ListenOptions, hypercorn_config
from triolet.testing.asgi import open_server
from triolet.testing.pipe import CAPACITY_BYTES, PipeStream, open_pipe
from triolet.testing.streams import Fault, FaultyStream
from triolet.testing.wire_client import WireClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from triolet.runtime.lifecycle import Served
    from triolet.server.deadline_stream import Buffer, Name

#: Names of the two ends, from the block that RFC 5737 sets aside for examples.
CLIENT_NAME, SERVER_NAME = ("192.0.2.2", 50_000), ("192.0.2.1", 80)


class PipeTransport(Transport):
    """The server's end of a pipe."""

    def __init__(self, pipe: PipeStream, *, send_timeout_s: float) -> None:
        super().__init__(send_timeout_s=send_timeout_s)
        self._pipe = pipe

    @property
    def closed(self) -> bool:
        """Whether this end was closed or aborted."""
        return self._pipe.closed

    def names(self) -> tuple[Name, Name]:
        """See :meth:`.Transport.names`."""
        if self.closed:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return CLIENT_NAME, SERVER_NAME

    def send_now(self, data: Buffer) -> int:
        """See :meth:`.Transport.send_now`."""
        return self._pipe.send_now(data)

    async def send_some(self, data: Buffer) -> int:
        """See :meth:`.Transport.send_some`."""
        return await self._pipe.send_some(data)

    def close(self) -> None:
        """See :meth:`.Transport.close`."""
        self._pipe.close()

    def reset(self) -> None:
        """See :meth:`.Transport.reset`."""
        self._pipe.reset()

    async def wait_send_all_might_not_block(self) -> None:
        """See :meth:`trio.abc.SendStream.wait_send_all_might_not_block`."""
        await self._pipe.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """See :meth:`trio.abc.ReceiveStream.receive_some`."""
        return await self._pipe.receive_some(max_bytes)

    async def send_eof(self) -> None:
        """See :meth:`trio.abc.HalfCloseableStream.send_eof`."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this connection")
        await self._pipe.send_eof()

    async def aclose(self) -> None:
        """See :meth:`trio.abc.AsyncResource.aclose`."""
        await self._pipe.aclose()


@attrs.define(eq=False)
class WireServer:
    """An ASGI app behind the server's own connections, which are in memory."""

    _app: PacedApp
    _options: ListenOptions
    _config: HypercornConfig
    _nursery: trio.Nursery
    _context: WorkerContext = attrs.field(factory=lambda: WorkerContext(None), init=False)
    _live: LiveConnections = attrs.field(init=False)
    #: Connections that have not ended.
    open_connections: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._live = LiveConnections(self._options.max_connections)

    def connect(
        self,
        *,
        sending: Iterable[Fault] = (),
        receiving: Iterable[Fault] = (),
        capacity_bytes: int = CAPACITY_BYTES,
    ) -> WireClient:
        """Connect a client; over the bound on connections, its connection is reset at once.

        Args:
            sending: Faults of what the client sends.
            receiving: Faults of what it receives.
            capacity_bytes: What the "kernel" holds of each direction.
        """
        ours, theirs = open_pipe(capacity_bytes)
        transport = PipeTransport(ours, send_timeout_s=self._options.send_timeout_s)
        if self._live.admit(transport):
            self.open_connections += 1
            self._nursery.start_soon(self._serve, transport)
        stream = FaultyStream(theirs, sending=sending, receiving=receiving)
        return WireClient(stream, transport.record)

    async def drain(self) -> None:
        """End as the server does: idle connections at once, others in time, the rest by a reset."""
        await self._context.terminated.set()
        with trio.move_on_after(self._options.graceful_timeout_s):
            await self._live.wait_empty()
        self._live.abort_all()

    def abort_all(self) -> None:
        """Reset every connection."""
        self._live.abort_all()

    async def _serve(self, transport: PipeTransport) -> None:
        try:
            await Connection(self._app, self._config, self._context, {}, transport).run()
        finally:
            self._live.remove(transport)
            self.open_connections -= 1


@asynccontextmanager
async def open_wire(
    app: AsgiApp, options: ListenOptions | None = None
) -> AsyncIterator[WireServer]:
    """Serve any ASGI app over connections in memory. Its lifespan is not called.

    Leaving ends the connections as a server does that shuts down.

    Args:
        app: What to serve.
        options: The server's limits; where it would listen does not matter.
    """
    options = options or ListenOptions()
    async with trio.open_nursery() as connections:
        server = WireServer(PacedApp(app), options, hypercorn_config(options), connections)
        try:
            yield server
            await server.drain()
        finally:
            # In this order the resets reach sends that are shielded from the cancellation.
            server.abort_all()
            connections.cancel_scope.cancel(reason="the server shuts down")


@attrs.frozen(eq=False)
class TrioletWire:
    """Triolet itself over connections in memory."""

    runtime: Runtime
    wire: WireServer


@asynccontextmanager
async def open_wire_server(
    served: Served | None = None,
    config: Config | None = None,
    options: ListenOptions | None = None,
) -> AsyncIterator[TrioletWire]:
    """Triolet over connections in memory, on a scripted engine unless told otherwise.

    Args:
        served: The model.
        config: The server's settings.
        options: Limits of connections; those of ``config`` where left out.
    """
    config = config or Config()
    if options is None:
        options = ListenOptions(
            send_timeout_s=config.send_timeout,
            keep_alive_timeout_s=config.keep_alive_timeout,
            max_connections=config.max_connections,
        )
    async with (
        open_server(served, config) as server,
        open_wire(server.client.app, options) as wire,
    ):
        yield TrioletWire(server.runtime, wire)
