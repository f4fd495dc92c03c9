"""One client's connection: a socket that cannot get stuck, under Hypercorn's protocol code.

Hypercorn parses HTTP/1.1, HTTP/2 and WebSocket; this file replaces the shell between that
code and the socket. Its rules:

1. A send that moves no byte for ``send_timeout_s`` ends the connection with a reset. Hypercorn
   shields its sends, so no cancel scope of the app could.
2. :meth:`DeadlineStream.abort` ends a connection at once, from any task, without an await.
3. What Hypercorn's state machines have counted as sent is sent whole, or the connection dies:
   an app's cancellation takes effect between two messages, never inside one.
4. A connection's exception is logged once and ends that connection alone. ``Cancelled`` and
   whatever is not an ``Exception`` pass through.
5. The app can read why its connection ended, in :class:`ConnectionRecord`.
6. A response that the app leaves without a last body never looks complete: HTTP/1.1 closes
   without the terminating chunk, HTTP/2 resets the stream (:mod:`triolet.server.protocol`).

Operation: one task per connection reads and feeds Hypercorn's protocol object, which starts
one task per request in the connection's nursery; those tasks come back through
``protocol_send``. While nothing else is sending, that is one plain non-blocking ``write`` and
no scheduler pass, which is five times the throughput of a lock and an awaited send per chunk.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import trio
import trio.lowlevel
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.typing import ConnectionState
from hypercorn.utils import LifespanFailureError, parse_socket_addr

from triolet.core import CancelCause
from triolet.server.protocol import Protocol
from triolet.server.tasks import ConnectionTasks

if TYPE_CHECKING:
    from hypercorn.config import Config
    from hypercorn.trio.task_group import TaskGroup
    from hypercorn.trio.worker_context import WorkerContext
    from hypercorn.typing import (
        AppWrapper,
        ASGIReceiveCallable,
        ASGISendCallable,
        ASGISendEvent,
        Scope,
    )

    Buffer: TypeAlias = bytes | bytearray | memoryview

_log = logging.getLogger(__name__)

#: Where a request finds its :class:`ConnectionRecord`: ``scope["state"][RECORD_KEY]``.
RECORD_KEY = "triolet.connection"

#: l_onoff = 1, l_linger = 0: closing discards unsent bytes and sends a reset.
_LINGER_RESET = struct.pack("ii", 1, 0)

#: Messages that an app may send before it must let other tasks run. A scheduler pass costs
#: about as much as one send, so this keeps its share near 6 % and the wait of others under 1 ms.
SENDS_PER_CHECKPOINT = 16

#: How long a client that is still uploading may take to read a refusal. Closing at once would
#: answer its next packet with a reset, and many clients then never look at the response.
LINGER_S = 2.0

#: ``app(scope, receive, send)``. Frameworks and servers each have their own types for the three.
AsgiApp: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]


@attrs.define(eq=False)
class ConnectionRecord:
    """Why the server ended a connection; shared by all requests on it."""

    #: ``SLOW_CLIENT`` after the send deadline, ``SHUTDOWN`` after a drain ran out of time,
    #: ``None`` while the connection lives and where the client closed it.
    ended_by: CancelCause | None = None


class DeadlineStream(trio.abc.HalfCloseableStream):
    """A socket stream whose sends have a deadline by progress, and that can be aborted.

    Only one task may send at a time (``trio.BusyResourceError``), as with ``SocketStream``.
    """

    def __init__(self, stream: trio.SocketStream, *, send_timeout_s: float) -> None:
        self.socket = stream.socket
        self.record = ConnectionRecord()
        self.send_timeout_s = send_timeout_s
        self._stream = stream
        self._sending = False

    def send_now(self, data: Buffer) -> int:
        """Give the kernel what it takes without waiting.

        Returns:
            Bytes taken, from the front of ``data``; 0 if the kernel's buffer is full.

        Raises:
            OSError: the connection is broken, or was closed or aborted.
        """
        try:
            # A plain write: Trio's socket offers no send that cannot wait.
            return os.write(self.socket.fileno(), data)
        except BlockingIOError:
            return 0

    async def send_all(self, data: Buffer) -> None:
        """Send all of ``data``.

        Raises:
            trio.BrokenResourceError: the peer is gone, or the kernel took no byte for
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
            if self.socket.fileno() == -1:
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
                sent += await self.socket.send(view[sent:])
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

    def abort(self, cause: CancelCause) -> None:
        """Reset the connection now. Blocked senders and readers raise; a second call is a no-op."""
        if self.socket.fileno() == -1:
            return
        if self.record.ended_by is None:
            self.record.ended_by = cause
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


class PacedApp:
    """An ASGI app in the shape Hypercorn calls.

    ``send`` raises the app's cancellation, and every few messages lets other tasks run, before
    the message reaches Hypercorn: the fast path of a connection has no checkpoint of its own,
    and Hypercorn drops messages to a closed WebSocket without one.

    An exception out of the lifespan call becomes ``LifespanFailureError``, which Hypercorn's
    ``Lifespan`` raises; any other it would log and serve on. ``lifespan_failed`` tells at once.
    """

    def __init__(self, app: AsgiApp) -> None:
        self.app = app
        self.lifespan_failed = False

    async def __call__(
        self,
        scope: Scope,
        receive: ASGIReceiveCallable,
        send: ASGISendCallable,
        sync_spawn: Callable[..., object],  # noqa: ARG002 (Hypercorn passes it, for WSGI)
        call_soon: Callable[..., object],  # noqa: ARG002 (likewise)
    ) -> None:
        """Run the app for one scope."""
        if scope["type"] == "lifespan":
            try:
                await self.app(scope, receive, send)
            except LifespanFailureError:
                self.lifespan_failed = True
                raise
            except Exception as error:
                self.lifespan_failed = True
                raise LifespanFailureError("lifespan", str(error)) from error
            return
        sent = 0

        async def paced_send(message: ASGISendEvent) -> None:
            nonlocal sent
            sent += 1
            if sent % SENDS_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()
            else:
                await trio.lowlevel.checkpoint_if_cancelled()
            await send(message)

        await self.app(scope, receive, paced_send)


class Connection(TCPServer):
    """One accepted connection, from handshake to close.

    Args:
        app: what :class:`PacedApp` makes of an ASGI app.
        config: Hypercorn's settings; its ``read_timeout`` bounds each wait for the rest of an
            HTTP/1.1 request body. (Hypercorn itself would apply it to the silence of a client
            that reads a long response.)
        context: Hypercorn's shared state of all connections.
        state: the lifespan state, copied into each request's scope.
        stream: the accepted socket, or TLS over it.
    """

    protocol: Protocol

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        state: dict[str, Any],
        stream: DeadlineStream | trio.SSLStream[DeadlineStream],
    ) -> None:
        self.transport = transport_of(stream)
        state = {**state, RECORD_KEY: self.transport.record}
        # Hypercorn names SocketStream, which is final; what it uses is a stream with a socket.
        super().__init__(app, config, context, state, stream)  # type: ignore[arg-type]
        self._tls = stream if isinstance(stream, trio.SSLStream) else None
        self._read_to_end = trio.Event()

    async def run(self) -> None:
        """Serve the connection to its end. Raises nothing but cancellation."""
        try:
            await self._run()
        except* Exception as errors:  # noqa: BLE001 (any bug in it is this connection's alone)
            _log.warning("a connection was ended by an error in it", exc_info=errors)
        await trio.lowlevel.checkpoint()

    async def _run(self) -> None:
        alpn = "http/1.1"
        if self._tls is not None:
            try:
                with trio.fail_after(self.config.ssl_handshake_timeout):
                    await self._tls.do_handshake()
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                # Not a TLS client, or gone: common, and no news.
                await trio.lowlevel.checkpoint()
                return
            alpn = self._tls.selected_alpn_protocol() or alpn
        try:
            async with trio.open_nursery() as helpers:
                async with ConnectionTasks(helpers) as tasks:
                    await self._converse(tasks, alpn)
                helpers.cancel_scope.cancel("the connection has ended")
        finally:
            self.transport.socket.close()

    async def _converse(self, tasks: TaskGroup, alpn: str) -> None:
        try:
            peer = self.transport.socket.getpeername()
        except OSError:
            await trio.lowlevel.checkpoint()
            return  # gone before we looked
        family = self.transport.socket.family
        self._task_group = tasks
        self.protocol = Protocol(
            self.app,
            self.config,
            self.context,
            tasks,
            ConnectionState(self.state),
            self._tls is not None,
            parse_socket_addr(family, peer),
            parse_socket_addr(family, self.transport.socket.getsockname()),
            self.protocol_send,
        )
        if alpn == "h2":
            self.protocol.start_http2()
        await self.protocol.initiate()
        await self.idle_task.restart(tasks, self._idle_timeout)
        await self._read_data()
        # Else the idle timer would hold a closed connection for the keep-alive timeout.
        self._read_to_end.set()
        await self.idle_task.stop()

    async def _read_data(self) -> None:
        while True:
            limit = self.config.read_timeout if self.protocol.awaits_body() else None
            try:
                with trio.fail_after(inf if limit is None else limit):
                    data = await self.stream.receive_some(MAX_RECV)
            except (trio.ClosedResourceError, trio.BrokenResourceError, trio.TooSlowError):
                break
            await self.protocol.handle(RawData(bytes(data)))
            if not data:
                break
        await self.protocol.handle(Closed())

    async def protocol_send(self, event: Event) -> None:  # noqa: ASYNC910 (see below)
        """Carry out what Hypercorn's protocol code asks for: data, a close, a change of idleness.

        Data takes the fast path while nothing else is sending. That path has no checkpoint:
        :class:`PacedApp` makes them, before Hypercorn's state machines move.
        """
        if isinstance(event, RawData):
            data = event.data
            if self._tls is None and not self.send_lock.locked():
                # A broken socket is reported by the slow path.
                with suppress(OSError):
                    data = data[self.transport.send_now(data) :]
            if data:
                await self._send(data)
        elif isinstance(event, Closed):
            if self.protocol.awaits_body():
                await self._linger()
            await self._close()
            await self.protocol.handle(Closed())
        elif isinstance(event, Updated) and not self._read_to_end.is_set():
            if event.idle:
                await self.idle_task.restart(self._task_group, self._idle_timeout)
            else:
                await self.idle_task.stop()

    async def _linger(self) -> None:
        """End our side and let the reader discard the rest of an upload that was refused."""
        with trio.move_on_after(LINGER_S):
            if self._tls is None:
                with suppress(
                    trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError
                ):
                    await self.transport.send_eof()
            await self._read_to_end.wait()

    async def _send(self, data: bytes) -> None:
        try:
            # Shielded so that no frame is sent in part or dropped after Hypercorn counted it.
            # The stream's send deadline and abort() bound the shield.
            with trio.CancelScope(shield=True):
                async with self.send_lock:
                    await self.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self.protocol.handle(Closed())


def transport_of(stream: DeadlineStream | trio.SSLStream[DeadlineStream]) -> DeadlineStream:
    """The socket stream under ``stream``, which may be TLS over it or itself."""
    return stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
