"""What bad clients do to the server and to each other: nothing. On real sockets."""

from __future__ import annotations

import random
import socket
import ssl
from contextlib import asynccontextmanager

import attrs
import h2.config
import h2.connection
import h11
import pytest
import trio
import trio.testing
import trustme

from triolet.core import CancelCause
from triolet.server.deadline_stream import RECORD_KEY
from triolet.server.listen import ListenOptions, serve

pytestmark = [pytest.mark.live, pytest.mark.slow]

UPGRADE = (
    b"GET %s HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
#: Bytes of the client's receive buffer: the kernel rounds it up, to a few packets.
SMALL_WINDOW = 4096
START = {"type": "http.response.start", "status": 200, "headers": []}
STUCK = ["h1", "h1 tls", "ws", "ws tls", "h2 tls"]


def body(data, *, more=True):
    return {"type": "http.response.body", "body": data, "more_body": more}


@attrs.define(eq=False)
class App:
    """Streams at ``/endless``, ``/story`` and ``/numbers``; answers the rest."""

    pages: trio.MemorySendChannel[bytes]
    told: trio.MemoryReceiveChannel[bytes]
    causes: list[CancelCause | None] = attrs.field(factory=list)
    ended: trio.Event = attrs.field(factory=trio.Event)

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            for _ in range(2):
                message = await receive()
                await send({"type": message["type"] + ".complete"})
        elif scope["path"] == "/endless":
            await self.endless(scope, receive, send)
        elif scope["path"] == "/story":
            await send(START)
            async for page in self.told:
                await send(body(page))
            await send(body(b"", more=False))
        elif scope["path"] == "/numbers":
            await send(START)
            for i in range(3000):
                await send(body(number(i)))
            await send(body(b"", more=False))
        elif scope["type"] == "websocket":
            await self.converse(receive, send)
        else:
            await self.answer(receive, send)

    async def endless(self, scope, receive, send):
        web_socket = scope["type"] == "websocket"
        await send({"type": "websocket.accept"} if web_socket else START)
        data = b"x" * 16_384
        message = {"type": "websocket.send", "bytes": data} if web_socket else body(data)
        try:
            async with trio.open_nursery() as nursery:

                async def pump():
                    while True:
                        await send(message)

                nursery.start_soon(pump)
                while not (await receive())["type"].endswith(".disconnect"):
                    pass
                nursery.cancel_scope.cancel("disconnect")
        finally:
            self.causes.append(scope["state"][RECORD_KEY].ended_by)
            self.ended.set()

    async def converse(self, receive, send):
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            await send({"type": "websocket.send", "text": "what?"})

    async def answer(self, receive, send):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            if not message["more_body"]:
                break
        await send(START)
        await send(body(b"well", more=False))


def number(i):
    return b"data: %d\n\n" % i * (i % 40 + 1)


@attrs.define(eq=False)
class Server:
    app: App
    port: int
    tls: ssl.SSLContext | None
    stop: trio.Event = attrs.field(factory=trio.Event)
    returned: trio.Event = attrs.field(factory=trio.Event)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    async def connect(self, *, alpn="http/1.1", window=None):
        sock = trio.socket.socket()
        if window is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        await sock.connect(("127.0.0.1", self.port))
        stream = trio.SocketStream(sock)
        if self.tls is None:
            return stream
        self.tls.set_alpn_protocols([alpn])
        return trio.SSLStream(stream, self.tls, server_hostname="localhost", https_compatible=True)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """Paths of a certificate and its key, and a context of clients that trust it."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return folder / "cert.pem", folder / "key.pem", context


class Announcement:
    """Takes the place of ``task_status``."""

    def __init__(self):
        self.made = trio.Event()
        self.port = 0

    def started(self, addresses):
        self.port = int(addresses[0].rpartition(":")[2])
        self.made.set()


@asynccontextmanager
async def running(certificate=None, **options):
    if certificate is not None:
        options["certfile"], options["keyfile"], _ = certificate
    options = ListenOptions(port=0, websocket_ping_interval_s=None, **options)
    app = App(*trio.open_memory_channel(0))
    server = Server(app, 0, None if certificate is None else certificate[2])
    announcement = Announcement()

    async def serve_until_stopped():
        with server.scope:
            await serve(app, options, shutdown_trigger=server.stop.wait, task_status=announcement)
        server.returned.set()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_until_stopped)
            await announcement.made.wait()
            server.port = announcement.port
            yield server
            server.stop.set()


class Story:
    """A well-behaved stream that must go on, byte for byte, whatever others do."""

    def __init__(self, server):
        self.server = server
        self.page = 0

    async def __aenter__(self):
        self.client = await self.server.connect()
        await self.client.send_all(b"GET /story HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await self.client.receive_some(1)
        return self

    async def __aexit__(self, *exc):
        await self.client.aclose()

    async def expect(self, data):
        received = await self.client.receive_some(len(data))
        while received and len(received) < len(data):
            more = await self.client.receive_some(len(data) - len(received))
            assert more, "the story ended early"
            received += more
        assert received == data

    async def tell(self):
        page = b"page %d\n" % self.page
        self.page += 1
        await self.server.app.pages.send(page)
        await self.expect(b"%x\r\n%s\r\n" % (len(page), page))

    async def end(self):
        await self.server.app.pages.aclose()
        await self.expect(b"0\r\n\r\n")
        assert await self.client.receive_some() == b""


def start_h2(client_window=2**24):
    connection = h2.connection.H2Connection(
        h2.config.H2Configuration(client_side=True, validate_outbound_headers=False)
    )
    connection.local_settings.initial_window_size = client_window
    connection.initiate_connection()
    connection.increment_flow_control_window(2**29)
    return connection


def h2_request(path="/endless"):
    connection = start_h2()
    headers = [(":method", "GET"), (":path", path), (":scheme", "https"), (":authority", "x")]
    connection.send_headers(1, headers, end_stream=True)
    return connection.data_to_send()


@asynccontextmanager
async def stuck_client(server, kind):
    """A client that asks for an endless stream, and reads nothing of it."""
    kind = kind.split()[0]
    client = await server.connect(alpn="h2" if kind == "h2" else "http/1.1", window=SMALL_WINDOW)
    requests = {
        "h1": b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n",
        "ws": UPGRADE % b"/endless",
        "h2": h2_request(),
    }
    await client.send_all(requests[kind])
    yield client
    await trio.aclose_forcefully(client)


@pytest.mark.parametrize("kind", STUCK)
async def test_a_client_that_stops_reading_is_cut_and_others_go_on(kind, certificate):
    async with (
        running(certificate if "tls" in kind else None, send_timeout_s=0.3) as server,
        Story(server) as story,
        stuck_client(server, kind),
    ):
        start = trio.current_time()
        while not server.app.ended.is_set():
            await story.tell()
        assert 0.3 <= trio.current_time() - start < 3
        assert server.app.causes == [CancelCause.SLOW_CLIENT]
        await story.tell()
        await story.end()


@pytest.mark.parametrize("kind", STUCK)
async def test_a_stuck_client_does_not_hold_the_shutdown(kind, certificate):
    async with (
        running(
            certificate if "tls" in kind else None, send_timeout_s=1000, graceful_timeout_s=0.1
        ) as server,
        stuck_client(server, kind),
    ):
        await trio.testing.wait_all_tasks_blocked(0.1)
        start = trio.current_time()
        server.stop.set()
        await server.returned.wait()
        assert trio.current_time() - start < 0.1 + 0.5
        assert server.app.causes == [CancelCause.SHUTDOWN]


@pytest.mark.parametrize("kind", STUCK)
async def test_a_stuck_client_does_not_hold_a_cancellation(kind, certificate):
    async with (
        running(
            certificate if "tls" in kind else None, send_timeout_s=1000, graceful_timeout_s=1000
        ) as server,
        stuck_client(server, kind),
    ):
        await trio.testing.wait_all_tasks_blocked(0.1)
        start = trio.current_time()
        server.scope.cancel()
        await server.returned.wait()
        assert trio.current_time() - start < 0.5


async def test_a_client_stuck_in_the_tls_handshake_does_not_hold_the_shutdown(certificate):
    async with (
        running(certificate, graceful_timeout_s=0.1) as server,
        await trio.open_tcp_stream("127.0.0.1", server.port),
    ):
        await trio.testing.wait_all_tasks_blocked(0.05)
        start = trio.current_time()
        server.stop.set()
        await server.returned.wait()
        assert trio.current_time() - start < 0.1 + 0.5


def connect_without_path():
    connection = start_h2()
    connection.send_headers(1, [(":method", "CONNECT"), (":authority", "x")])
    return connection.data_to_send()


KILLERS = {
    "websocket frame before the 101": [UPGRADE % b"/" + b"\x89\x80\x00\x00\x00\x00"],
    "websocket frames right behind": [UPGRADE % b"/", b"\x81\x85\x00\x00\x00\x00hello" * 100],
    "websocket nonsense": [UPGRADE % b"/", b"\xff" * 1000],
    "CONNECT without :path": [connect_without_path()],
    "h2 preface and nonsense": [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\xff" * 1000],
    "h2c upgrade and nonsense": [
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nHTTP2-Settings: \r\n\r\n",
        b"\xff" * 100,
    ],
    "not ascii in the path": [b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n"],
    "bad chunk": [b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", b"zz\r\n"],
    "endless header": [b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000],
    "TLS to a plain port": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200],
}


@pytest.mark.parametrize("parts", KILLERS.values(), ids=KILLERS)
async def test_a_killer_ends_only_its_own_connection(parts, caplog):
    async with running() as server, Story(server) as story:
        for _ in range(5):
            async with await server.connect() as client:
                for part in parts:
                    try:
                        await client.send_all(part)
                    except trio.BrokenResourceError:
                        break
                    await story.tell()
            await story.tell()
        await story.end()


def junk(randomness):
    """Random bytes, alone, in a request, behind one, or inside another protocol."""
    noise = randomness.randbytes(randomness.randrange(1, 2000))
    request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(noise)
    cut = randomness.randrange(len(request))
    return randomness.choice([
        noise,
        request[:cut] + noise,
        request + noise,
        request + noise + noise,
        UPGRADE % b"/" + noise,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + noise,
        h2_request("/") + noise,
        h2_request("/endless")[: cut * 2] + noise,
    ])


async def test_junk_does_not_disturb_a_running_stream():
    randomness = random.Random(20_261_129)
    async with running() as server, Story(server) as story:
        for _ in range(200):
            async with await server.connect() as client:
                try:
                    await client.send_all(junk(randomness))
                    if randomness.random() < 0.3:
                        await client.send_eof()
                except trio.BrokenResourceError:
                    pass
                await story.tell()
        await story.end()


async def test_slow_and_fast_readers_all_get_every_byte():
    expected = b"".join(number(i) for i in range(3000))
    results = []

    async def read(server, *, window, step):
        parser = h11.Connection(h11.CLIENT)
        request = h11.Request(
            method="GET", target="/numbers", headers=[("host", "x"), ("connection", "close")]
        )
        async with await server.connect(window=window) as client:
            await client.send_all(parser.send(request) + parser.send(h11.EndOfMessage()))
            text = b""
            while not isinstance(event := parser.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    parser.receive_data(await client.receive_some(step))
                elif isinstance(event, h11.Data):
                    text += event.data
        results.append(text == expected)

    async with running() as server, trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(lambda: read(server, window=SMALL_WINDOW, step=1024))
            nursery.start_soon(lambda: read(server, window=None, step=65_536))
    assert results == [True] * 8
