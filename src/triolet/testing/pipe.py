"""A connection in memory that fills up, as the kernel's do.

Trio's own ``memory_stream_pair`` takes any number of bytes and its lockstep streams take none,
so with neither can a test tell a client that reads slowly from one that has stopped. Here each
direction holds so many bytes and no more. The rules are a socket's:

1. A send waits while the direction is full. What it has handed over by the time it is cancelled
   stays handed over.
2. Closing one end delivers what was sent, then the end of the stream. The peer's sends break.
3. :meth:`PipeStream.reset` delivers nothing more: whatever the peer does then breaks.

Nothing here is particular to Triolet.
"""

from __future__ import annotations

import errno
import operator
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import trio
import trio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Iterator

    Buffer: TypeAlias = bytes | bytearray | memoryview

#: What the send and receive buffers of a connection hold together, to the order of magnitude.
CAPACITY_BYTES = 65_536


class _Direction:
    """Bytes on their way from one end to the other."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.data = bytearray()
        #: The sender has ended it.
        self.ended = False
        #: The receiver is gone, or either end was reset.
        self.broken = False
        self._changed = trio.Event()

    def room(self) -> int:
        return self.capacity_bytes - len(self.data)

    def put(self, data: Buffer) -> int:
        taken = min(len(data), self.room())
        if taken:
            self.data += memoryview(data)[:taken]
            self.change()
        return taken

    def take(self, max_bytes: int | None) -> bytes:
        taken = bytes(self.data[:max_bytes])
        del self.data[:max_bytes]
        self.change()
        return taken

    def end(self) -> None:
        self.ended = True
        self.change()

    def break_off(self) -> None:
        self.broken = True
        self.data.clear()
        self.change()

    def change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def wait_change(self) -> None:
        await self._changed.wait()


class PipeStream(trio.abc.HalfCloseableStream):
    """One end of a pipe. Made by :func:`open_pipe`."""

    def __init__(self, outgoing: _Direction, incoming: _Direction) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._sending = self._receiving = False
        self.closed = False

    @property
    def unread_bytes(self) -> int:
        """Bytes that the peer has sent and nobody has received here."""
        return len(self._incoming.data)

    @property
    def undelivered_bytes(self) -> int:
        """Bytes sent here that the peer has not received."""
        return len(self._outgoing.data)

    def send_now(self, data: Buffer) -> int:
        """Send what there is room for, without waiting.

        Returns:
            Bytes taken, from the front of ``data``; 0 if the pipe is full.

        Raises:
            OSError: The peer is gone, or this end was closed.
        """
        if self.closed or self._outgoing.ended:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self._outgoing.broken:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        return self._outgoing.put(data)

    async def send_some(self, data: Buffer) -> int:
        """As :meth:`send_now`, but wait until at least one byte is taken."""
        await trio.lowlevel.checkpoint()
        while (sent := self.send_now(data)) == 0 and len(data):
            await self._outgoing.wait_change()
        return sent

    async def send_all(self, data: Buffer) -> None:
        """Send all of ``data``, waiting for room.

        Raises:
            trio.BrokenResourceError: The peer is gone.
            trio.ClosedResourceError: This end was closed, or has sent its end.
            trio.BusyResourceError: Another task is sending.
        """
        sent = 0
        with self._sole_sender():
            try:
                while True:
                    sent += await self.send_some(memoryview(data)[sent:])
                    if sent == len(data):
                        return
            except OSError as error:
                raise self._error(error) from None

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until there is room for a byte, or the pipe is broken."""
        outgoing = self._outgoing
        with self._sole_sender():
            await trio.lowlevel.checkpoint()
            while not (self.closed or outgoing.broken or outgoing.room()):
                await outgoing.wait_change()
        if self.closed:
            raise trio.ClosedResourceError("this end was closed")

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Receive what is there, at most ``max_bytes``; none at the end of the stream.

        Raises:
            trio.BrokenResourceError: The connection was reset.
            trio.ClosedResourceError: This end was closed.
            trio.BusyResourceError: Another task is receiving.
        """
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this stream")
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError("max_bytes must be at least 1")
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint()
            while True:
                if self.closed:
                    raise trio.ClosedResourceError("this end was closed")
                if self._incoming.broken:
                    raise trio.BrokenResourceError("the connection was reset")
                if self._incoming.data:
                    return self._incoming.take(max_bytes)
                if self._incoming.ended:
                    return b""
                await self._incoming.wait_change()
        finally:
            self._receiving = False

    async def send_eof(self) -> None:
        """End the direction from here; the other goes on. Again: nothing."""
        with self._sole_sender():
            await trio.lowlevel.checkpoint()
        if self.closed:
            raise trio.ClosedResourceError("this end was closed")
        self._outgoing.end()

    def close(self) -> None:
        """Close this end. What was sent is still delivered; the peer's sends break."""
        if not self.closed:
            self.closed = True
            self._outgoing.end()
            self._incoming.break_off()

    async def aclose(self) -> None:
        """As :meth:`close`, and a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()

    def reset(self) -> None:
        """Close this end and break both directions at once; what was sent is lost."""
        if not self.closed:
            self.closed = True
            self._outgoing.break_off()
            self._incoming.break_off()

    @contextmanager
    def _sole_sender(self) -> Iterator[None]:
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            yield
        finally:
            self._sending = False

    def _error(self, error: OSError) -> Exception:
        if self.closed or self._outgoing.ended:
            return trio.ClosedResourceError("this end was closed")
        return trio.BrokenResourceError(f"the peer is gone: {error.strerror}")


def open_pipe(capacity_bytes: int = CAPACITY_BYTES) -> tuple[PipeStream, PipeStream]:
    """The two ends of a new pipe that holds so many bytes in each direction.

    Raises:
        ValueError: It could hold nothing.
    """
    if capacity_bytes < 1:
        raise ValueError("a pipe holds at least 1 byte")
    there, back = _Direction(capacity_bytes), _Direction(capacity_bytes)
    return PipeStream(there, back), PipeStream(back, there)
