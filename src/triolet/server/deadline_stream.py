"""A transport that cannot get stuck, and the record of why it was closed.

:class:`Transport` is what a connection needs of whatever carries its bytes; it owns the send
deadline. :class:`DeadlineStream` is the one over a socket. The other one is in
:mod:`triolet.testing.wire`: it is why the two are apart.
"""

from __future__ import annotations

import os
import socket
import struct
from abc import abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

import attrs
import trio
import trio.lowlevel
from hypercorn.utils import parse_socket_addr

from triolet.core import CancelCause

if TYPE_CHECKING:
    Buffer: TypeAlias = bytes | bytearray | memoryview
    Name: TypeAlias = tuple[str, int] | None

#: Where a request finds its :class:`ConnectionRecord` or, on HTTP/2, its
#: :class:`StreamRecord`: ``scope["state"][RECORD_KEY]``.
RECORD_KEY = "triolet.connection"

#: l_onoff = 1, l_linger = 0: closing discards unsent bytes and sends a reset.
_LINGER_RESET = struct.pack("ii", 1, 0)


@attrs.define(eq=False)
class ConnectionRecord:
    """Why the server ended a connection; shared by all requests on it."""

    #: ``SLOW_CLIENT`` after the send deadline, ``SHUTDOWN`` after a drain ran out of time,
    #: ``None`` while the connection lives and where the client closed it.
    ended_by: CancelCause | None = None


@attrs.define(eq=False)
class StreamRecord:
    """Why the server ended one HTTP/2 stream: by itself, or with all others of its connection."""

    connection: ConnectionRecord
    #: ``SLOW_CLIENT`` after the send deadline of this stream, ``None`` otherwise.
    reset_by: CancelCause | None = None

    @property
    def ended_by(self) -> CancelCause | None:
        """As in :class:`ConnectionRecord`."""
        return self.reset_by or self.connection.ended_by


class Transport(trio.abc.HalfCloseableStream):
    """A byte stream whose sends have a deadline by progress, and that can be aborted.

    Only one task may send at a time (``trio.BusyResourceError``), as with ``SocketStream``.
    An implementation says how bytes are moved; when to give up is decided here.
    """

    def __init__(self, *, send_timeout_s: float) -> None:
        self.record = ConnectionRecord()
        self.send_timeout_s = send_timeout_s
        self._sending = False

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether this end was closed or aborted."""

    @abstractmethod
    def names(self) -> tuple[Name, Name]:
        """Host and port of the peer, and our own; ``None`` where they have none.

        Raises:
            OSError: the peer is gone.
        """

    @abstractmethod
    def send_now(self, data: Buffer) -> int:
        """Hand over what is taken without waiting.

        Returns:
            Bytes taken, from the front of ``data``; 0 if there is no room.

        Raises:
            OSError: the connection is broken, or was closed or aborted.
        """

    @abstractmethod
    async def send_some(self, data: Buffer) -> int:
        """As :meth:`send_now`, but wait until at least one byte is taken."""

    @abstractmethod
    def close(self) -> None:
        """Close at once, without waiting; what was handed over is still delivered."""

    @abstractmethod
    def reset(self) -> None:
        """Close at once, throw away what is on its way, and have the peer see an error."""

    def abort(self, cause: CancelCause) -> None:
        """Reset the connection now. Blocked senders and readers raise; a second call is a no-op."""
        if self.closed:
            return
        if self.record.ended_by is None:
            self.record.ended_by = cause
        self.reset()

    async def send_all(self, data: Buffer) -> None:
        """Send all of ``data``.

        Raises:
            trio.BrokenResourceError: the peer is gone, or it took no byte for
                ``send_timeout_s``; in the second case the connection has been reset.
            trio.ClosedResourceError: this end was closed or aborted.
            trio.BusyResourceError: another task is sending.
        """
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this connection")
        self._sending = True
        try:
            with memoryview(data) as view:
                await self._send_view(view)
        except OSError as error:
            if self.closed:
                raise trio.ClosedResourceError("this connection was closed") from None
            raise trio.BrokenResourceError(f"connection broken: {error}") from error
        finally:
            self._sending = False

    async def _send_view(self, view: memoryview) -> None:
        sent = self.send_now(view)
        if sent == len(view):
            await trio.lowlevel.checkpoint()
            return
        while True:
            with trio.move_on_after(self.send_timeout_s) as scope:
                sent += await self.send_some(view[sent:])
            if scope.cancelled_caught:
                # A nearly full buffer takes bytes long before it counts as writable.
                progress = self.send_now(view[sent:])
                if progress == 0:
                    self.abort(CancelCause.SLOW_CLIENT)
                    raise trio.BrokenResourceError(
                        f"the client took no byte for {self.send_timeout_s:g} s"
                    )
                sent += progress
            if sent == len(view):
                return


class DeadlineStream(Transport):
    """A :class:`Transport` over a socket: the kernel's buffer is what may be full."""

    def __init__(self, stream: trio.SocketStream, *, send_timeout_s: float) -> None:
        super().__init__(send_timeout_s=send_timeout_s)
        self.socket = stream.socket
        self._stream = stream

    @property
    def closed(self) -> bool:
        """Whether the socket was closed or aborted."""
        return self.socket.fileno() == -1

    def names(self) -> tuple[Name, Name]:
        """See :meth:`Transport.names`."""
        family = self.socket.family
        peer, own = self.socket.getpeername(), self.socket.getsockname()
        return parse_socket_addr(family, peer), parse_socket_addr(family, own)

    def send_now(self, data: Buffer) -> int:
        """Give the kernel what it takes without waiting. See :meth:`Transport.send_now`."""
        try:
            # A plain write: Trio's socket offers no send that cannot wait.
            return os.write(self.socket.fileno(), data)
        except BlockingIOError:
            return 0

    async def send_some(self, data: Buffer) -> int:
        """See :meth:`Transport.send_some`."""
        return await self.socket.send(data)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        self.socket.close()

    def reset(self) -> None:
        """See :meth:`Transport.reset`."""
        with suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        self.socket.close()

    async def wait_send_all_might_not_block(self) -> None:
        """See :meth:`trio.abc.SendStream.wait_send_all_might_not_block`."""
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """See :meth:`trio.abc.ReceiveStream.receive_some`."""
        return await self._stream.receive_some(max_bytes)

    async def send_eof(self) -> None:
        """See :meth:`trio.abc.HalfCloseableStream.send_eof`."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this connection")
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close the socket; what the kernel holds is still delivered."""
        await self._stream.aclose()
