"""One client's connection: Hypercorn's protocol code over a transport that cannot get stuck.

Hypercorn parses HTTP/1.1, HTTP/2 and WebSocket; this file replaces the shell between that
code and the socket. Its rules:

1. A send that moves no byte for ``send_timeout_s`` ends the connection with a reset, and
   :meth:`.Transport.abort` ends it at once, from any task. Hypercorn shields its sends, so
   no cancel scope of the app could.
2. What Hypercorn's state machines have counted as sent is sent whole, or the connection dies:
   an app's cancellation takes effect between two messages, never inside one.
3. The reader never waits for an app's response: a client that leaves is noticed, whatever it
   sent behind its request. (With :data:`HELD_BYTES` behind it, only once the response is over.)
4. A connection's exception is logged once and ends that connection alone. ``Cancelled`` and
   whatever is not an ``Exception`` pass through.
5. The app can read why its connection or stream ended, in ``scope["state"][RECORD_KEY]``.
6. A response that the app leaves without a last body never looks complete: HTTP/1.1 closes
   without the terminating chunk, HTTP/2 resets the stream (:mod:`triolet.server.http2`).

Operation: one task per connection reads and feeds Hypercorn's protocol object, which starts
one task per request in the connection's nursery; those tasks come back through
``protocol_send``. While nothing else is sending, that is one plain non-blocking ``write`` and
no scheduler pass, which is five times the throughput of a lock and an awaited send per chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import trio
import trio.lowlevel
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.typing import ConnectionState
from hypercorn.utils import LifespanFailureError

from triolet.server.deadline_stream import RECORD_KEY, Transport
from triolet.server.http2 import Limits
from triolet.server.protocol import PEER_ERRORS, Protocol, Resumed
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

_log = logging.getLogger(__name__)

T = TypeVar("T", bound=Transport)

#: Messages that an app may send before it must let other tasks run. A scheduler pass costs
#: about as much as one send, so this keeps its share near 6 % and the wait of others under 1 ms.
SENDS_PER_CHECKPOINT = 16

#: How long a client that is still uploading may take to read a refusal. Closing at once would
#: answer its next packet with a reset, and many clients then never look at the response.
LINGER_S = 2.0

#: ``app(scope, receive, send)``. Frameworks and servers each have their own types for the three.
AsgiApp: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]


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
        config: Hypercorn's settings; its ``read_timeout`` bounds each wait for the rest of a
            request body. (Hypercorn itself would apply it to the silence of a client that
            reads a long response.)
        context: Hypercorn's shared state of all connections.
        state: the lifespan state, copied into each request's scope.
        stream: the accepted transport, or TLS over it.
    """

    protocol: Protocol

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        state: dict[str, Any],
        stream: T | trio.SSLStream[T],
    ) -> None:
        self.transport: Transport = transport_of(stream)
        state = {**state, RECORD_KEY: self.transport.record}
        # Hypercorn names SocketStream, which is final; what it uses is a stream with a socket.
        super().__init__(app, config, context, state, stream)  # type: ignore[arg-type]
        self._tls = stream if isinstance(stream, trio.SSLStream) else None
        self._read_to_end = trio.Event()

    async def run(self) -> None:
        """Serve the connection to its end. Raises nothing but cancellation."""
        try:
            await self._run()
        except* PEER_ERRORS as errors:
            # Any client can cause these at will: one line, and none of its bytes.
            names = ", ".join(sorted(names_of(errors)))
            _log.info("a client broke the protocol and lost its connection: %s", names)
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
            self.transport.close()

    async def _converse(self, tasks: TaskGroup, alpn: str) -> None:
        try:
            peer, own = self.transport.names()
        except OSError:
            await trio.lowlevel.checkpoint()
            return  # gone before we looked
        self._task_group = tasks
        self.protocol = Protocol(
            self.app,
            self.config,
            self.context,
            tasks,
            ConnectionState(self.state),
            self._tls is not None,
            peer,
            own,
            self.protocol_send,
            limits=Limits(
                send_timeout_s=self.transport.send_timeout_s,
                read_timeout_s=self.config.read_timeout or inf,
                record=self.transport.record,
            ),
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
            try:
                data = await self._receive()
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                break
            if data is not None:
                await self.protocol.handle(RawData(bytes(data)))
                if not data:
                    break
            elif self.protocol.gate.take():
                await self.protocol.handle(Resumed())
            elif not await self.protocol.read_too_late():
                break
        await self.protocol.handle(Closed())

    async def _receive(self) -> bytes | bytearray | None:
        """The next bytes, none at their end; ``None`` if something else is due first."""
        gate, room = self.protocol.gate, self.protocol.room()
        with trio.CancelScope(deadline=self.protocol.read_deadline()) as gate.reading:
            if gate.resumable:
                await trio.lowlevel.checkpoint()
            elif room:
                return await self.stream.receive_some(room)
            else:
                await trio.sleep_forever()
        return None

    async def protocol_send(self, event: Event) -> None:  # noqa: ASYNC910 (see below)
        """Carry out what Hypercorn's protocol code asks for: data, a close, a change of idleness.

        Data takes the fast path while nothing else is sending. That path has no checkpoint:
        :class:`PacedApp` makes them, before Hypercorn's state machines move.
        """
        if isinstance(event, RawData):
            data = event.data
            if self._tls is None and not self.send_lock.locked():
                # A broken transport is reported by the slow path.
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


def transport_of(stream: T | trio.SSLStream[T]) -> T:
    """The transport under ``stream``, which may be TLS over it or itself."""
    return stream.transport_stream if isinstance(stream, trio.SSLStream) else stream


def names_of(error: BaseException) -> set[str]:
    """The class of an error, or those of all errors in a group."""
    if isinstance(error, BaseExceptionGroup):
        return {name for one in error.exceptions for name in names_of(one)}
    return {type(error).__name__}
