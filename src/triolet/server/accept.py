"""Letting connections in: all that are ready, within bounds.

The rules:

1. One pass of the event loop takes up to :data:`ACCEPTS_PER_PASS` connections. One connection
   a pass would make the last of 256 wait for 256 passes, which under load are seconds.
2. Between the kernel handing out a socket and a task owning it there is no checkpoint, so no
   cancellation can leak one. Handshakes are that task's business.
3. A connection that its client gave up before we looked is nothing. A machine without room for
   another is a pause, said once. Any other error is raised, and ends the server.
"""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING, NoReturn

import trio
import trio.lowlevel

from triolet.core import CancelCause

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from triolet.server.deadline_stream import Transport

_log = logging.getLogger(__name__)

#: Connections taken before other tasks run. Starting one takes 0.3 ms of the loop, so a burst
#: holds running streams up by no more than a step of a small model.
ACCEPTS_PER_PASS = 64

#: How long to leave a machine alone that is out of descriptors or buffers. The figure is Trio's.
BACK_OFF_S = 0.1

#: Nothing left for another connection: of this process, of the machine, of the kernel's memory.
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

#: The connection failed while it waited for us: accept(2) on Linux reports what befell it as
#: its own error, and a firewall's verdict as EPERM.
_LOST = frozenset({
    errno.ECONNABORTED, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN,
    errno.ENETUNREACH, errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EPERM, errno.EPROTO,
    errno.ETIMEDOUT,
})  # fmt: skip


async def accept_connections(
    listener: socket.socket, start: Callable[[socket.socket], None]
) -> NoReturn:
    """Accept connections until cancelled, then close the listener.

    Args:
        listener: listening and non-blocking; owned by this call.
        start: takes over an accepted socket, or raises and leaves it to be closed.

    Raises:
        OSError: the listener is broken.
    """
    starved = False
    with listener:
        while True:
            await trio.lowlevel.wait_readable(listener)
            try:
                _accept_ready(listener, start)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                if not starved:
                    reason = os.strerror(error.errno)
                    _log.error("cannot accept connections: %s; trying again", reason)
                starved = True
                await trio.sleep(BACK_OFF_S)
            else:
                starved = False


def _accept_ready(listener: socket.socket, start: Callable[[socket.socket], None]) -> None:
    for _ in range(ACCEPTS_PER_PASS):
        try:
            accepted, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in _LOST:
                continue
            raise
        try:
            start(accepted)
        except BaseException:
            accepted.close()
            raise


class LiveConnections:
    """The live connections, bounded.

    Beyond the bound a connection is reset at once. To stop accepting instead would leave
    clients in the kernel's backlog, where no deadline of ours reaches them and where 1000 idle
    keep-alive connections could hold them for a minute; a reset is an answer that client
    libraries retry and load balancers route around.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._live: set[Transport] = set()
        self._empty = trio.Event()
        self._empty.set()
        self._refusing = False

    def admit(self, stream: Transport) -> bool:
        """Count ``stream`` until it is removed; ``False`` if it was refused and reset."""
        if len(self._live) >= self._limit:
            if not self._refusing:
                _log.warning("refusing connections: %d are open, the most allowed", self._limit)
            self._refusing = True
            stream.abort(CancelCause.SHUTDOWN)
            return False
        self._refusing = False
        if not self._live:
            self._empty = trio.Event()
        self._live.add(stream)
        return True

    def remove(self, stream: Transport) -> None:
        """Count ``stream`` no longer."""
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
