"""A connection over a real socket pair, its client, and apps to serve on it."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager

import attrs
import h2.config
import h2.connection
import h2.events
import h2.settings
import trio
from hypercorn.trio.worker_context import WorkerContext

from triolet.server.connection import (
    Connection,
    PacedApp,
)
from triolet.server.deadline_stream import DeadlineStream
from triolet.server.listen import ListenOptions, hypercorn_config

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
UPLOAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n\r\n"
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
MASKED_PING = b"\x89\x80\x00\x00\x00\x00"
#: Words in a message too long for the kernel to take at once.
PER_MESSAGE = 20_000
START = {"type": "http.response.start", "status": 200, "headers": []}


def body(data, *, more=True):
    return {"type": "http.response.body", "body": data, "more_body": more}


def stream_pair(send_timeout_s=30.0):
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
    return (
        DeadlineStream(
            trio.SocketStream(trio.socket.from_stdlib_socket(ours)), send_timeout_s=send_timeout_s
        ),
        trio.SocketStream(trio.socket.from_stdlib_socket(theirs)),
    )


@attrs.define(eq=False)
class Served:
    client: trio.SocketStream
    stream: DeadlineStream
    done: trio.Event
    scope: trio.CancelScope
    connection: Connection | None = None

    @property
    def context(self):
        return self.connection.context

    def protocol_holds(self):
        return len(self.connection.protocol.protocol.connection.trailing_data[0])

    @property
    def record(self):
        return self.stream.record


@asynccontextmanager
async def connected(app, **options):
    """A client's end of a connection that serves ``app``."""
    options = ListenOptions(**options)
    stream, client = stream_pair(options.send_timeout_s)
    served = Served(client, stream, trio.Event(), trio.CancelScope())
    served.connection = connection = Connection(
        PacedApp(app), hypercorn_config(options), WorkerContext(None), {"shared": 1}, stream
    )

    async def converse():
        with served.scope:
            await connection.run()
        served.done.set()

    with trio.fail_after(5000):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(converse)
            yield served
            await client.aclose()
            await served.done.wait()


async def read_all(client):
    data = b""
    with trio.fail_after(1000):
        while more := await client.receive_some(65_536):
            data += more
    return data


async def until_disconnect(receive):
    while (await receive())["type"] not in ("http.disconnect", "websocket.disconnect"):
        pass


async def endless(scope, receive, send):
    """Streams until the client is gone, racing its sends against the disconnect."""
    await send(START)
    async with trio.open_nursery() as nursery:

        async def pump():
            while True:
                await send(body(b"x" * 4096))

        nursery.start_soon(pump)
        await until_disconnect(receive)
        nursery.cancel_scope.cancel("disconnect")


async def unfinished(scope, receive, send):
    await send(START)
    await send(body(b"half of an answer"))


async def finished(scope, receive, send):
    await unfinished(scope, receive, send)
    await send(body(b"", more=False))


class H2Client:
    def __init__(self, client, *, window=65_535):
        self.client = client
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.h2.local_settings = h2.settings.Settings(
            client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
        )
        self.h2.initiate_connection()
        self.pending = []

    def request(self, *, method="GET", path="/", end_stream=True):
        stream_id = self.h2.get_next_available_stream_id()
        headers = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "x")]
        self.h2.send_headers(stream_id, headers, end_stream=end_stream)
        return stream_id

    async def flush(self):
        await self.client.send_all(self.h2.data_to_send())

    async def until(self, kind):
        """All events up to the first of ``kind``."""
        seen = []
        await trio.lowlevel.checkpoint()
        while not (seen and isinstance(seen[-1], kind)):
            if self.pending:
                seen.append(event := self.pending.pop(0))
                if isinstance(event, h2.events.DataReceived):
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                continue
            await self.flush()
            data = await self.client.receive_some(65_536)
            assert data, "the connection ended"
            self.pending = self.h2.receive_data(data)
        return seen


async def silent(scope, receive, send):
    await until_disconnect(receive)
