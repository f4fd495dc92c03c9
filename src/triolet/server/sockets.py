"""Listening sockets: how one is opened, what its connections inherit, what it is called."""

from __future__ import annotations

import errno
import os
import socket
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import trio

from triolet.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from triolet.server.listen import ListenOptions

#: The kernel's own limit comes second, so that the app learns the reason from ours.
USER_TIMEOUT_MARGIN_S = 5.0

#: Between two probes of a peer that answered none. Only dead peers ever get a second one.
PROBE_INTERVAL_S = 1

#: Linux's own limit of TCP_KEEPIDLE.
_MAX_KEEPIDLE_S = 32_767
_MILLISECONDS_PER_SECOND = 1000


async def open_listeners(options: ListenOptions) -> list[socket.socket]:
    """Open non-blocking sockets that listen where ``options`` say; a host may have several.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    where = f"port {options.port} of {options.host}" if options.uds is None else f"{options.uds}"
    try:
        if options.uds is not None:
            listeners = [_open_unix_listener(options.uds, options.backlog)]
            await trio.lowlevel.checkpoint()
        else:
            listeners = [
                _plain(listener)
                for listener in await trio.open_tcp_listeners(
                    options.port, host=options.host, backlog=options.backlog
                )
            ]
    except OSError as error:
        if _errno_of(error) == errno.EADDRINUSE:
            message = f"Cannot listen on {where}: it is in use. Stop its owner or choose another."
        else:
            message = f"Cannot listen on {where}: {error.strerror or error}."
        raise ConfigError(message, param="port" if options.uds is None else "uds") from error
    for listener in listeners:
        set_send_buffer(listener, options)
        if options.uds is None and sys.platform == "linux":
            _notice_dead_peers(listener, options.send_timeout_s)
    return listeners


def _notice_dead_peers(listener: socket.socket, send_timeout_s: float) -> None:
    """Have the kernel end connections to machines that went dark, also while nothing is sent.

    A probe goes out after ``send_timeout_s`` of silence. The user timeout bounds how long that,
    or data, may stay without an answer (RFC 5482, and tcp(7) on the two together).
    """
    limit_ms = int((send_timeout_s + USER_TIMEOUT_MARGIN_S) * _MILLISECONDS_PER_SECOND)
    idle_s = min(max(1, round(send_timeout_s)), _MAX_KEEPIDLE_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_INTERVAL_S)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def set_send_buffer(sock: socket.socket, options: ListenOptions) -> None:
    """Bound what the kernel holds for one client. TCP connections inherit it, Unix ones do not."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.socket_send_buffer_bytes)


def url_of(listener: socket.socket, scheme: str) -> str:
    """The address of a listener as a URL, or as ``unix:PATH``."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[0], name[1]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _plain(listener: trio.SocketListener) -> socket.socket:
    """The socket of a Trio listener, which offers no accept that cannot wait."""
    sock = socket.socket(fileno=listener.socket.detach())
    sock.settimeout(0)
    return sock


def _open_unix_listener(path: Path, backlog: int) -> socket.socket:
    _clear_dead_socket(path)
    with ExitStack() as until_listening:
        sock = until_listening.enter_context(socket.socket(socket.AF_UNIX))
        sock.settimeout(0)
        sock.bind(os.fspath(path))
        sock.listen(backlog)
        until_listening.pop_all()
    return sock


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
