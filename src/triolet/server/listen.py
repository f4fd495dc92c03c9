"""Serving an ASGI app on a port: our accept loop and drain around Hypercorn's protocol code.

Order, outside in: the app's lifespan, the connections, the accept loop. Each is a nursery
inside the one before, so stopping is leaving them from the inside: no new connections, then
a bounded time for the open ones, then resets for what is left, then the app's shutdown.
Whatever ends :func:`serve` — the trigger, a crash, a cancellation — goes through the same
resets, so no client can hold the return.

A failure raises. (Hypercorn's own command logs some and exits 0.)
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio
from hypercorn.config import Config
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.utils import LifespanFailureError, LifespanTimeoutError

from triolet.errors import ConfigError, StartupError
from triolet.server.accept import LiveConnections, accept_connections
from triolet.server.connection import AsgiApp, Connection, PacedApp
from triolet.server.deadline_stream import DeadlineStream
from triolet.server.sockets import open_listeners, set_send_buffer, url_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

_log = logging.getLogger(__name__)

#: A TLS handshake takes a few round trips; a slow phone on a bad network is done in this.
TLS_HANDSHAKE_TIMEOUT_S = 15.0

#: Hypercorn ends a connection after this many requests, and on HTTP/2 the streams running on
#: it with it. No reason of ours asks for that: out of reach.
KEEP_ALIVE_MAX_REQUESTS = 2**31

#: Streams of one HTTP/2 connection that a client may have open; RFC 9113 advises at least 100.
H2_MAX_STREAMS = 100

_MAX_PORT = 65_535


def _positive(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{attribute.name} must be above 0, not {value:g}.")


def _not_negative(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value >= 0:
        raise ConfigError(f"{attribute.name} must be 0 or more, not {value:g}.")


def _port(_: object, attribute: attrs.Attribute[Any], value: int) -> None:
    if not 0 <= value <= _MAX_PORT:
        raise ConfigError(f"{attribute.name} must be between 0 and {_MAX_PORT}, not {value}.")


@attrs.frozen
class ListenOptions:
    """Where to listen, and what one client may cost. Times in seconds.

    Raises:
        ConfigError: a value out of range, or a certificate without its key.
    """

    host: str = "127.0.0.1"
    #: 0 lets the kernel choose.
    port: int = attrs.field(default=8000, validator=_port)
    #: A Unix socket to listen on instead of ``host`` and ``port``.
    uds: Path | None = None
    #: PEM files; both or neither. With them the port speaks TLS only.
    certfile: Path | None = None
    keyfile: Path | None = None
    #: A connection whose kernel buffer takes no byte for this long is reset.
    send_timeout_s: float = attrs.field(default=30.0, validator=_positive)
    #: SO_SNDBUF of each connection: what a stuck client can hold in the kernel. Linux books
    #: twice this, for its own overhead.
    socket_send_buffer_bytes: int = attrs.field(default=65_536, validator=_positive)
    #: A connection without a request, or with headers half sent, is closed after this. Above
    #: the 60 s of common load balancers, which otherwise race a request against our close.
    keep_alive_timeout_s: float = attrs.field(default=75.0, validator=_positive)
    #: Each wait for the next bytes of a request body.
    read_timeout_s: float = attrs.field(default=30.0, validator=_positive)
    #: What open connections get after ``shutdown_trigger`` has returned, before the reset.
    graceful_timeout_s: float = attrs.field(default=1.0, validator=_not_negative)
    #: Open connections; more are reset at once, see :class:`.LiveConnections`.
    max_connections: int = attrs.field(default=1000, validator=_positive)
    #: Connections the kernel completes before we accept them. Beyond, it drops the first packet of
    #: a client, which tries again a second later.
    backlog: int = attrs.field(default=1024, validator=_positive)
    #: Request line and headers together.
    max_header_bytes: int = attrs.field(default=32_768, validator=_positive)
    #: One WebSocket message, after decompression.
    max_websocket_message_bytes: int = attrs.field(default=16 * 2**20, validator=_positive)
    #: Pings to WebSocket clients; ``None`` sends none. A peer that is gone leaves them
    #: unacknowledged and TCP_USER_TIMEOUT ends the connection.
    websocket_ping_interval_s: float | None = 20.0

    def __attrs_post_init__(self) -> None:
        if (self.certfile is None) != (self.keyfile is None):
            raise ConfigError("TLS needs both a certificate and its key; one is missing.")


async def serve(
    app: AsgiApp,
    options: ListenOptions,
    *,
    shutdown_trigger: Callable[[], Awaitable[None]],
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve ``app`` until ``shutdown_trigger`` returns, then close within a bounded time.

    While the trigger runs, connections are accepted and served: a drain belongs in it. After it
    returns, open connections have ``options.graceful_timeout_s``; what is left is reset.
    ``task_status.started`` gives the addresses once they accept connections, as URLs
    (``http://127.0.0.1:8000``) or ``unix:PATH``.

    Raises:
        ConfigError: the address cannot be listened on, or the certificate not be read.
        StartupError: the app's lifespan startup failed.
        ExceptionGroup: the accept loop or the app's running lifespan crashed.
    """
    config = hypercorn_config(options)
    tls = _tls_context(config)
    listeners = await open_listeners(options)
    addresses = [url_of(one, "http" if tls is None else "https") for one in listeners]
    application = PacedApp(app)
    state: dict[str, Any] = {}
    lifespan = Lifespan(application, config, state)
    started = False
    try:
        async with trio.open_nursery() as lifespan_nursery:
            await lifespan_nursery.start(lifespan.handle_lifespan)
            # Closed: the app's lifespan has ended already. Its error, if any, is on its way here.
            with suppress(trio.ClosedResourceError):
                await lifespan.wait_for_startup()
            if not application.lifespan_failed:
                started = True
                server = _Server(application, config, options, state, tls)
                async with _accepting(server, listeners):
                    task_status.started(addresses)
                    await shutdown_trigger()
                # An app may end its lifespan early; there is nobody left to tell then.
                if not lifespan.shutdown.is_set():
                    await lifespan.wait_for_shutdown()
            # A cancellation would take the place of a failure that is on its way here.
            if not application.lifespan_failed:
                lifespan_nursery.cancel_scope.cancel("the app has shut down")
    except BaseExceptionGroup as group:
        _, others = group.split((LifespanFailureError, LifespanTimeoutError))
        if started or others is not None:
            raise
        _log.error("the app failed to start", exc_info=group)
        raise StartupError("The app failed to start; the cause is in the log.") from group
    finally:
        for listener in listeners:
            listener.close()
        if options.uds is not None:
            options.uds.unlink(missing_ok=True)


class _Server:
    """What every connection is served with."""

    def __init__(
        self,
        app: PacedApp,
        config: Config,
        options: ListenOptions,
        state: dict[str, Any],
        tls: ssl.SSLContext | None,
    ) -> None:
        self.app = app
        self.config = config
        self.options = options
        self.state = state
        self.tls = tls
        # No limit of requests: a server that stops by itself after so many is not ours.
        self.context = WorkerContext(max_requests=None)
        self.connections = LiveConnections(options.max_connections)

    def start(self, handlers: trio.Nursery, accepted: socket.socket) -> None:
        """Serve an accepted socket in a task of its own, or reset it if there are too many."""
        if accepted.family == socket.AF_UNIX:
            set_send_buffer(accepted, self.options)
        socket_stream = trio.SocketStream(trio.socket.from_stdlib_socket(accepted))
        stream = DeadlineStream(socket_stream, send_timeout_s=self.options.send_timeout_s)
        if self.connections.admit(stream):
            handlers.start_soon(self._handle, stream)

    async def _handle(self, transport: DeadlineStream) -> None:
        try:
            stream = self._secured(transport)
            await Connection(self.app, self.config, self.context, self.state, stream).run()
        finally:
            self.connections.remove(transport)
            transport.socket.close()

    def _secured(
        self, transport: DeadlineStream
    ) -> DeadlineStream | trio.SSLStream[DeadlineStream]:
        if self.tls is None:
            return transport
        # https_compatible: HTTP frames its own ends, and waits for no TLS closing handshake.
        return trio.SSLStream(transport, self.tls, server_side=True, https_compatible=True)


@asynccontextmanager
async def _accepting(server: _Server, listeners: list[socket.socket]) -> AsyncIterator[None]:
    """Accept and serve connections while the block runs, then close them in bounded time."""
    async with trio.open_nursery() as handlers:
        try:
            async with trio.open_nursery() as accepting:
                start = partial(server.start, handlers)
                for listener in listeners:
                    accepting.start_soon(accept_connections, listener, start)
                yield
                accepting.cancel_scope.cancel("shutting down")
            await server.context.terminated.set()
            with trio.move_on_after(server.options.graceful_timeout_s):
                await server.connections.wait_empty()
        finally:
            # In this order the resets reach sends that are shielded from the cancellation.
            server.connections.abort_all()
            handlers.cancel_scope.cancel("shutting down")


def hypercorn_config(options: ListenOptions) -> Config:
    """Hypercorn's settings for ``options``; addresses are not among them, the sockets are ours."""
    config = Config()
    config.accesslog = None
    config.errorlog = logging.getLogger("triolet.server.hypercorn")
    config.include_server_header = False
    config.backlog = options.backlog
    config.keep_alive_timeout = options.keep_alive_timeout_s
    config.keep_alive_max_requests = KEEP_ALIVE_MAX_REQUESTS
    config.read_timeout = options.read_timeout_s  # type: ignore[assignment]  # a float serves
    config.ssl_handshake_timeout = TLS_HANDSHAKE_TIMEOUT_S
    config.graceful_timeout = options.graceful_timeout_s
    config.h11_max_incomplete_size = options.max_header_bytes
    config.h2_max_header_list_size = options.max_header_bytes
    config.h2_max_concurrent_streams = H2_MAX_STREAMS
    config.websocket_max_message_size = options.max_websocket_message_bytes
    config.websocket_ping_interval = options.websocket_ping_interval_s
    config.certfile = None if options.certfile is None else os.fspath(options.certfile)
    config.keyfile = None if options.keyfile is None else os.fspath(options.keyfile)
    return config


def _tls_context(config: Config) -> ssl.SSLContext | None:
    try:
        return config.create_ssl_context()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"Cannot use the certificate {config.certfile} with the key {config.keyfile}: "
            f"{error.strerror or error}."
        ) from error
