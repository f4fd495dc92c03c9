"""Connections over real socket pairs, in virtual time: the kernel's buffers, nobody's minutes."""

from __future__ import annotations

import logging
import socket
from contextlib import asynccontextmanager

import attrs
import h2.config
import h2.connection
import h2.events
import h2.settings
import h11
import pytest
import trio
import trio.testing
from hypercorn.trio.worker_context import WorkerContext

from triolet.core import CancelCause
from triolet.server.connection import (
    LINGER_S,
    RECORD_KEY,
    SENDS_PER_CHECKPOINT,
    Connection,
    DeadlineStream,
    PacedApp,
)
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

    @property
    def record(self):
        return self.stream.record


@asynccontextmanager
async def connected(app, **options):
    """A client's end of a connection that serves ``app``."""
    options = ListenOptions(**options)
    stream, client = stream_pair(options.send_timeout_s)
    served = Served(client, stream, trio.Event(), trio.CancelScope())
    connection = Connection(
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


async def test_a_client_that_stops_reading_is_reset_after_the_send_timeout(autojump_clock):
    async with connected(endless, send_timeout_s=30) as served:
        await served.client.send_all(GET)
        start = trio.current_time()
        await served.done.wait()
        assert trio.current_time() - start == pytest.approx(30, abs=0.1)
        assert served.record.ended_by is CancelCause.SLOW_CLIENT


async def test_a_client_that_reads_slowly_is_not_cut(autojump_clock):
    async with connected(endless, send_timeout_s=30) as served:
        await served.client.send_all(GET)
        for _ in range(20):
            await trio.sleep(25)
            assert await served.client.receive_some(8192)
        assert not served.done.is_set()
        assert served.record.ended_by is None


async def test_the_app_reads_in_its_scope_why_the_connection_ended(autojump_clock):
    causes = []

    async def app(scope, receive, send):
        assert scope["state"]["shared"] == 1
        await endless(scope, receive, send)
        causes.append(scope["state"][RECORD_KEY].ended_by)

    async with connected(app) as served:
        await served.client.send_all(GET)
        await served.done.wait()
    async with connected(app) as served:
        await served.client.send_all(GET)
        await served.client.receive_some(100)
    assert causes == [CancelCause.SLOW_CLIENT, None]


async def test_abort_frees_a_blocked_sender_at_once_and_only_the_first_cause_counts(
    autojump_clock,
):
    stream, client = stream_pair()
    async with client, trio.open_nursery() as nursery:

        async def blocked():
            with pytest.raises(trio.ClosedResourceError):
                await stream.send_all(b"x" * 10_000_000)

        nursery.start_soon(blocked)
        await trio.testing.wait_all_tasks_blocked()
        stream.abort(CancelCause.SHUTDOWN)
        stream.abort(CancelCause.SLOW_CLIENT)
    assert trio.current_time() < 1
    assert stream.record.ended_by is CancelCause.SHUTDOWN
    with pytest.raises(trio.ClosedResourceError):
        await stream.send_all(b"x")


async def test_two_senders_at_once_are_refused(autojump_clock):
    stream, client = stream_pair()
    async with client, stream, trio.open_nursery() as nursery:
        nursery.start_soon(stream.send_all, b"x" * 10_000_000)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await stream.send_all(b"y")
        with pytest.raises(trio.BusyResourceError):
            await stream.send_eof()
        nursery.cancel_scope.cancel()


async def test_sending_to_a_client_that_has_left_breaks():
    stream, client = stream_pair()
    await client.aclose()
    async with stream:
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(b"x")


async def unfinished(scope, receive, send):
    await send(START)
    await send(body(b"half of an answer"))


async def finished(scope, receive, send):
    await unfinished(scope, receive, send)
    await send(body(b"", more=False))


async def test_an_unfinished_http1_response_ends_without_the_terminating_chunk(autojump_clock):
    async with connected(unfinished) as served:
        await served.client.send_all(GET)
        data = await read_all(served.client)
    assert data.endswith(b"half of an answer\r\n")


async def test_a_finished_http1_response_has_the_terminating_chunk(autojump_clock):
    async with connected(finished) as served:
        await served.client.send_all(GET[:-2] + b"Connection: close\r\n\r\n")
        assert (await read_all(served.client)).endswith(b"0\r\n\r\n")


class H2Client:
    def __init__(self, client, *, window=65_535):
        self.client = client
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.h2.local_settings = h2.settings.Settings(
            client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
        )
        self.h2.initiate_connection()
        self.pending = []

    def request(self, *, method="GET", end_stream=True):
        stream_id = self.h2.get_next_available_stream_id()
        headers = [(":method", method), (":path", "/"), (":scheme", "http"), (":authority", "x")]
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


async def test_an_unfinished_http2_response_is_reset_after_its_text(autojump_clock):
    async with connected(unfinished) as served:
        client = H2Client(served.client)
        client.request()
        events = await client.until((h2.events.StreamReset, h2.events.StreamEnded))
        text = b"".join(e.data for e in events if isinstance(e, h2.events.DataReceived))
        assert text == b"half of an answer"
        assert isinstance(events[-1], h2.events.StreamReset)
        client.request()
        await client.until(h2.events.StreamReset)


async def test_a_reset_waits_for_text_that_a_slow_client_has_yet_to_take(autojump_clock):
    async def app(scope, receive, send):
        await send(START)
        for _ in range(3):
            await send(body(b"x" * 10_000))

    async with connected(app) as served:
        client = H2Client(served.client, window=5000)
        client.request()
        await client.flush()
        await trio.testing.wait_all_tasks_blocked()
        events = await client.until((h2.events.StreamReset, h2.events.StreamEnded))
    assert isinstance(events[-1], h2.events.StreamReset)
    assert sum(len(e.data) for e in events if isinstance(e, h2.events.DataReceived)) == 30_000


async def test_a_finished_http2_response_is_not_reset(autojump_clock):
    async with connected(finished) as served:
        client = H2Client(served.client)
        client.request()
        events = await client.until(h2.events.StreamEnded)
        client.request()
        events += await client.until(h2.events.StreamEnded)
    assert not any(isinstance(event, h2.events.StreamReset) for event in events)


async def test_an_http2_sender_blocked_on_flow_control_wakes_when_the_client_leaves(
    autojump_clock,
):
    async def app(scope, receive, send):
        await send(START)
        for _ in range(10):  # no race against receive: it must wake by itself
            await send(body(b"x" * 100_000))
        await until_disconnect(receive)

    async with connected(app) as served:
        client = H2Client(served.client)
        client.request()
        await client.until(h2.events.DataReceived)
        await trio.testing.wait_all_tasks_blocked()
        await served.client.aclose()
        await served.done.wait()
    assert trio.current_time() < 1


async def test_http2_body_data_for_a_response_that_is_over_disturbs_nobody(autojump_clock):
    async with connected(finished) as served:
        client = H2Client(served.client)
        upload = client.request(method="POST", end_stream=False)
        await client.until(h2.events.StreamEnded)
        client.h2.send_data(upload, b"late", end_stream=True)
        client.request()
        await client.until(h2.events.StreamEnded)


async def test_an_error_in_a_connection_is_logged_once_and_contained(autojump_clock, caplog):
    async with connected(finished) as served:
        client = H2Client(served.client)
        client.h2.config.validate_outbound_headers = False
        client.h2.send_headers(1, [(":method", "CONNECT"), (":authority", "x")])
        await client.flush()
        await read_all(served.client)
        await served.done.wait()
    ours = [r for r in caplog.records if r.name == "triolet.server.connection"]
    assert [r.levelno for r in ours] == [logging.WARNING]
    assert ours[0].exc_info


@pytest.mark.parametrize(
    "sent", [UPGRADE + MASKED_PING, UPGRADE.replace(b": 13", b": 99")], ids=["early", "version"]
)
async def test_a_bad_websocket_handshake_is_answered_and_closed(autojump_clock, sent):
    async def app(scope, receive, send):
        await until_disconnect(receive)

    async with connected(app) as served:
        await served.client.send_all(sent)
        assert (await read_all(served.client)).startswith(b"HTTP/1.1 400")
    assert trio.current_time() < 1


async def test_a_cancellation_passes_through_the_guard(autojump_clock, caplog):
    async def app(scope, receive, send):
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("a bug in cleanup")

    async with connected(app) as served:
        await served.client.send_all(GET)
        await trio.testing.wait_all_tasks_blocked()
        served.scope.cancel()
        await served.done.wait()
        assert served.scope.cancelled_caught
        assert "a bug in cleanup" in caplog.text


async def test_a_cancelled_app_loses_no_message_and_still_sends_its_error_ending(autojump_clock):
    async def app(scope, receive, send):
        await send(START)
        i = 0
        with trio.move_on_after(100) as deadline:
            while True:
                await send(body(b"%d " % i * PER_MESSAGE))
                i += 1
        assert deadline.cancelled_caught
        await send(body(b"error"))

    async with connected(app) as served:
        await served.client.send_all(GET)
        data = b""
        while trio.current_time() < 120:
            await trio.sleep(1)
            data += await served.client.receive_some(8192)
        data += await read_all(served.client)
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    parser.receive_data(data)
    text = b""
    while (event := parser.next_event()) is not h11.NEED_DATA:
        if isinstance(event, h11.Data):
            text += event.data
    words = text.split()
    assert words.pop() == b"error"
    assert words == [b"%d" % (i // PER_MESSAGE) for i in range(len(words))]


async def test_an_app_that_only_sends_lets_other_tasks_run(autojump_clock):
    messages, ticks = SENDS_PER_CHECKPOINT * 20, 0

    async def app(scope, receive, send):
        await send(START)
        before = ticks
        for _ in range(messages):
            await send(body(b"."))
        assert ticks - before >= 18
        await send(body(b"", more=False))

    async with connected(app) as served, trio.open_nursery() as nursery:

        async def tick():
            nonlocal ticks
            while True:
                await trio.lowlevel.checkpoint()
                ticks += 1

        nursery.start_soon(tick)
        await served.client.send_all(GET[:-2] + b"Connection: close\r\n\r\n")
        data = await read_all(served.client)
        nursery.cancel_scope.cancel()
    assert data.endswith(b"0\r\n\r\n")


async def test_a_cancellation_takes_effect_before_the_next_message(autojump_clock):
    async def app(scope, receive, send):
        await send(START)
        with trio.CancelScope() as cancelled:
            cancelled.cancel("test")
            await send(body(b"never"))
        assert cancelled.cancelled_caught
        await send(body(b"over", more=False))

    async with connected(app) as served:
        await served.client.send_all(GET[:-2] + b"Connection: close\r\n\r\n")
        data = await read_all(served.client)
    assert b"over" in data
    assert b"never" not in data


async def test_an_app_that_sends_to_a_closed_websocket_can_be_cancelled(autojump_clock):
    async def app(scope, receive, send):
        await send({"type": "websocket.accept"})
        await until_disconnect(receive)
        with trio.move_on_after(0) as deadline:
            while True:
                await send({"type": "websocket.send", "text": "."})
        assert deadline.cancelled_caught

    async with connected(app) as served:
        await served.client.send_all(UPGRADE)
        await served.client.receive_some(1000)


@pytest.mark.parametrize("requests", [b"", GET], ids=["unused", "after a request"])
async def test_a_client_that_closes_an_idle_connection_frees_it_at_once(autojump_clock, requests):
    async with connected(finished) as served:
        await served.client.send_all(requests)
        await trio.testing.wait_all_tasks_blocked()
        await served.client.aclose()
        await served.done.wait()
    assert trio.current_time() < 1


async def test_a_closed_websocket_does_not_wait_for_its_next_ping(autojump_clock):
    async def app(scope, receive, send):
        await send({"type": "websocket.accept"})
        await until_disconnect(receive)

    async with connected(app, websocket_ping_interval_s=20) as served:
        await served.client.send_all(UPGRADE)
        assert b"101" in await served.client.receive_some(1000)
        await trio.testing.wait_all_tasks_blocked()
        await served.client.aclose()
        await served.done.wait()
    assert trio.current_time() < 1


@pytest.mark.parametrize("sent", [b"", GET[:20]], ids=["nothing", "half a header"])
async def test_a_connection_without_a_whole_request_ends_at_the_keep_alive_timeout(
    autojump_clock, sent
):
    async with connected(finished, keep_alive_timeout_s=75) as served:
        await served.client.send_all(sent)
        assert await read_all(served.client) == b""
    assert trio.current_time() == pytest.approx(75, abs=1)


async def test_a_half_sent_body_ends_at_the_read_timeout(autojump_clock):
    async def app(scope, receive, send):
        await until_disconnect(receive)

    async with connected(app, read_timeout_s=30) as served:
        await served.client.send_all(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf")
        await served.done.wait()
    assert trio.current_time() == pytest.approx(30, abs=1)


async def test_a_client_hears_why_its_upload_is_refused_and_frees_its_connection(autojump_clock):
    async def app(scope, receive, send):
        await trio.sleep(1)  # until the queue of unread body parts is full
        await finished(scope, receive, send)

    async with connected(app) as served:
        await served.client.send_all(UPLOAD)
        await served.client.send_all(b"x" * 9_999_999)
        assert (await read_all(served.client)).endswith(b"0\r\n\r\n")
        await served.client.aclose()
        await served.done.wait()
    assert trio.current_time() < 2


async def test_an_app_that_reads_late_still_gets_the_disconnect(autojump_clock):
    types = []

    async def app(scope, receive, send):
        await trio.sleep(1)
        types.extend([(await receive())["type"] for _ in range(20)])

    async with connected(app) as served:
        await served.client.send_all(UPLOAD)
        with trio.move_on_after(0.5):
            await served.client.send_all(b"x" * 9_999_999)
        await served.client.aclose()
    assert types[0] == "http.request"
    assert types[-1] == "http.disconnect"


async def test_an_upload_that_nobody_wants_is_not_read_for_ever(autojump_clock):
    async with connected(finished) as served:
        await served.client.send_all(
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n\r\n"
        )
        await served.client.send_all(b"x")
        await served.done.wait()
    assert trio.current_time() == pytest.approx(LINGER_S, abs=0.5)


async def test_a_long_response_is_not_ended_by_the_read_timeout(autojump_clock):
    async def app(scope, receive, send):
        await send(START)
        await trio.sleep(600)
        await send(body(b"late", more=False))

    async with connected(app, read_timeout_s=30) as served:
        await served.client.send_all(GET[:-2] + b"Connection: close\r\n\r\n")
        assert b"late" in await read_all(served.client)


async def test_no_software_version_is_advertised(autojump_clock):
    async with connected(unfinished) as served:
        await served.client.send_all(GET)
        data = (await read_all(served.client)).lower()
    assert b"server:" not in data
    assert b"hypercorn" not in data
