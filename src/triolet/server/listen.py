"""Serving an ASGI app on a port: our accept loop and drain around Hypercorn's protocol code.

Order, outside in: the app's lifespan, the connections, the accept loop. Each is a nursery
inside the one before, so stopping is leaving them from the inside: no new connections, then
a bounded time for the open ones, then resets for what is left, then the app's shutdown.
Whatever ends :func:`serve` — the trigger, a crash, a cancellation — goes through the same
resets, so no client can hold the return.

A failure raises. (Hypercorn's own command logs some and exits 0.)
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio
from hypercorn.config import Config
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.utils import LifespanFailureError, LifespanTimeoutError

from triolet.core import CancelCause
from triolet.errors import ConfigError, StartupError
from triolet.server.connection import AsgiApp, Connection, PacedApp, transport_of
from triolet.server.deadline_stream import DeadlineStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

_log = logging.getLogger(__name__)

#: A TLS handshake takes a few round trips; a slow phone on a bad network is done in this.
TLS_HANDSHAKE_TIMEOUT_S = 15.0

#: The kernel's own limit comes second, so that the app learns the reason from ours.
USER_TIMEOUT_MARGIN_S = 5.0

#: Hypercorn ends a connection after this many requests, and on HTTP/2 the streams running on
#: it with it. No reason of ours asks for that: out of reach.
KEEP_ALIVE_MAX_REQUESTS = 2**31

#: Streams of one HTTP/2 connection that a client may have open; RFC 9113 advises at least 100.
H2_MAX_STREAMS = 100

_MILLISECONDS_PER_SECOND = 1000
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
    #: Open connections; more are reset at once, see :class:`_Connections`.
    max_connections: int = attrs.field(default=1000, validator=_positive)
    #: Connections the kernel completes before we accept them.
    backlog: int = attrs.field(default=128, validator=_positive)
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


class _Connections:
    """The live connections, bounded.

    Beyond the bound a connection is reset at once. To stop accepting instead would leave
    clients in the kernel's backlog, where no deadline of ours reaches them and where 1000 idle
    keep-alive connections could hold them for a minute; a reset is an answer that client
    libraries retry and load balancers route around.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._live: set[DeadlineStream] = set()
        self._empty = trio.Event()
        self._empty.set()
        self._refusing = False

    @contextmanager
    def admit(self, stream: DeadlineStream) -> Iterator[bool]:
        """Count ``stream`` while the block runs; ``False`` if it was refused and reset."""
        if len(self._live) >= self._limit:
            if not self._refusing:
                _log.warning("refusing connections: %d are open, the most allowed", self._limit)
            self._refusing = True
            stream.abort(CancelCause.SHUTDOWN)
            yield False
            return
        self._refusing = False
        if not self._live:
            self._empty = trio.Event()
        self._live.add(stream)
        try:
            yield True
        finally:
            self._live.remove(stream)
            if not self._live:
                self._empty.set()

    async def wait_empty(self) -> None:
        """Wait until no connection is open."""
        await self._empty.wait()

    def abort_all(self) -> None:
        """Reset every live connection."""
        for stream in self._live:
            stream.abort(CancelCause.SHUTDOWN)


@attrs.define(eq=False)
class _DeadlineListener(trio.abc.Listener[DeadlineStream]):
    """A socket listener whose connections have a send deadline."""

    listener: trio.SocketListener
    options: ListenOptions

    async def accept(self) -> DeadlineStream:
        stream = await self.listener.accept()
        if stream.socket.family == socket.AF_UNIX:
            # Unlike TCP's, these do not inherit the listener's buffer size.
            _set_send_buffer(stream.socket, self.options)
        return DeadlineStream(stream, send_timeout_s=self.options.send_timeout_s)

    async def aclose(self) -> None:
        await self.listener.aclose()


_Listener = _DeadlineListener | trio.SSLListener[DeadlineStream]


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
    sockets = await _open_listeners(options)
    addresses = [_address(one.socket, "http" if tls is None else "https") for one in sockets]
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
                async with _accepting(server, sockets):
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
        for listener in sockets:
            listener.socket.close()
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
        self.connections = _Connections(options.max_connections)

    async def handle(self, stream: DeadlineStream | trio.SSLStream[DeadlineStream]) -> None:
        with self.connections.admit(transport_of(stream)) as admitted:
            if admitted:
                await Connection(self.app, self.config, self.context, self.state, stream).run()
            else:
                await trio.aclose_forcefully(stream)

    def listener(self, listener: trio.SocketListener) -> _Listener:
        plain = _DeadlineListener(listener, self.options)
        if self.tls is None:
            return plain
        # https_compatible: HTTP frames its own ends, and waits for no TLS closing handshake.
        return trio.SSLListener(plain, self.tls, https_compatible=True)


@asynccontextmanager
async def _accepting(server: _Server, sockets: list[trio.SocketListener]) -> AsyncIterator[None]:
    """Accept and serve connections while the block runs, then close them in bounded time."""
    listeners = [server.listener(one) for one in sockets]
    async with trio.open_nursery() as handlers:
        try:
            async with trio.open_nursery() as accepting:
                await accepting.start(
                    partial(
                        trio.serve_listeners, server.handle, listeners, handler_nursery=handlers
                    )
                )
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


async def _open_listeners(options: ListenOptions) -> list[trio.SocketListener]:
    where = f"port {options.port} of {options.host}" if options.uds is None else f"{options.uds}"
    try:
        if options.uds is not None:
            listeners = [await _open_unix_listener(options.uds, options.backlog)]
        else:
            listeners = await trio.open_tcp_listeners(
                options.port, host=options.host, backlog=options.backlog
            )
    except OSError as error:
        if _errno_of(error) == errno.EADDRINUSE:
            message = f"Cannot listen on {where}: it is in use. Stop its owner or choose another."
        else:
            message = f"Cannot listen on {where}: {error.strerror or error}."
        raise ConfigError(message, param="port" if options.uds is None else "uds") from error
    for listener in listeners:
        _set_send_buffer(listener.socket, options)
        if options.uds is None and hasattr(socket, "TCP_USER_TIMEOUT"):
            limit_s = options.send_timeout_s + USER_TIMEOUT_MARGIN_S
            limit_ms = int(limit_s * _MILLISECONDS_PER_SECOND)
            listener.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
    return listeners


async def _open_unix_listener(path: Path, backlog: int) -> trio.SocketListener:
    _clear_dead_socket(path)
    sock = trio.socket.socket(socket.AF_UNIX)
    try:
        await sock.bind(os.fspath(path))
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return trio.SocketListener(sock)


def _clear_dead_socket(path: Path) -> None:
    """Remove the socket that a dead server left at ``path``; a live one's stays."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(0)
            if probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED:
                path.unlink()


def _errno_of(error: OSError) -> int | None:
    """The errno, also of the bare ``OSError`` that Trio raises from several failures."""
    if error.errno is None and isinstance(error.__cause__, OSError):
        return error.__cause__.errno
    return error.errno


def _set_send_buffer(sock: trio.socket.SocketType, options: ListenOptions) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.socket_send_buffer_bytes)


def _address(sock: trio.socket.SocketType, scheme: str) -> str:
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[0], name[1]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
