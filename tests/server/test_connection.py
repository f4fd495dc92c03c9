"""Connections over real socket pairs, in virtual time: the kernel's buffers, nobody's minutes."""

from __future__ import annotations

import logging

import h11
import pytest
import trio
import trio.testing
from tests.server.connecting import (
    GET,
    PER_MESSAGE,
    START,
    UPGRADE,
    UPLOAD,
    body,
    connected,
    endless,
    finished,
    read_all,
    stream_pair,
    unfinished,
    until_disconnect,
)

from triolet.core import CancelCause
from triolet.server.connection import (
    LINGER_S,
    RECORD_KEY,
    SENDS_PER_CHECKPOINT,
)
from triolet.server.protocol import Protocol


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


async def test_an_unfinished_http1_response_ends_without_the_terminating_chunk(autojump_clock):
    async with connected(unfinished) as served:
        await served.client.send_all(GET)
        data = await read_all(served.client)
    assert data.endswith(b"half of an answer\r\n")


async def test_a_finished_http1_response_has_the_terminating_chunk(autojump_clock):
    async with connected(finished) as served:
        await served.client.send_all(GET[:-2] + b"Connection: close\r\n\r\n")
        assert (await read_all(served.client)).endswith(b"0\r\n\r\n")


async def end_by(error, monkeypatch, caplog):
    """What a connection logs that ``error`` ends."""

    async def handle(self, event):
        await trio.lowlevel.checkpoint()
        raise error

    caplog.set_level(logging.INFO)
    with monkeypatch.context() as patch:
        patch.setattr(Protocol, "handle", handle)
        async with connected(finished) as served:
            await served.client.send_all(GET)
            await read_all(served.client)
            await served.done.wait()
    (record,) = (r for r in caplog.records if r.name == "triolet.server.connection")
    return record


async def test_a_bug_in_a_connection_is_logged_once_and_contained(
    autojump_clock, caplog, monkeypatch
):
    record = await end_by(RuntimeError("a bug"), monkeypatch, caplog)
    assert record.levelno == logging.WARNING
    assert record.exc_info


async def test_a_breach_of_protocol_is_one_line_without_the_clients_bytes(
    autojump_clock, caplog, monkeypatch
):
    error = UnicodeDecodeError("ascii", b"evil", 0, 1, "no")
    record = await end_by(error, monkeypatch, caplog)
    assert record.levelno == logging.INFO
    assert not record.exc_info
    assert "UnicodeDecodeError" in record.getMessage()
    assert "evil" not in record.getMessage()


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
