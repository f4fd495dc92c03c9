"""HTTP/2 streams: their ends, their windows, their bodies."""

from __future__ import annotations

from contextlib import asynccontextmanager
from itertools import pairwise

import h2.errors
import h2.events
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from tests.server.connecting import (
    START,
    H2Client,
    body,
    connected,
    endless,
    finished,
    read_all,
    silent,
    unfinished,
    until_disconnect,
)

from triolet.core import CancelCause
from triolet.server.connection import (
    RECORD_KEY,
)
from triolet.server.http2 import HIGH_WATER_BYTES, FrameLengths


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


@pytest.mark.parametrize(
    "headers",
    [
        [(":method", "CONNECT"), (":authority", "x")],
        [(":method", "G\xff"), (":path", "/"), (":scheme", "http"), (":authority", "x")],
        [(":method", "GET"), (":path", "/\xff"), (":scheme", "http"), (":authority", "x")],
    ],
    ids=["no path", "method", "path"],
)
async def test_a_malformed_http2_request_ends_its_stream_alone(autojump_clock, caplog, headers):
    async with connected(finished, keep_alive_timeout_s=75) as served:
        client = H2Client(served.client)
        client.h2.config.validate_outbound_headers = False
        client.h2.send_headers(1, headers, end_stream=True)
        await client.until(h2.events.StreamReset)
        client.request()
        await client.until(h2.events.StreamEnded)
    assert not caplog.records


@asynccontextmanager
async def reading(client):
    """Keep a client's socket empty, and its window as it is."""
    async with trio.open_nursery() as nursery:

        async def read():
            while data := await client.client.receive_some(65_536):
                client.pending += client.h2.receive_data(data)

        nursery.start_soon(read)
        yield
        nursery.cancel_scope.cancel()


async def test_a_closed_window_makes_the_app_wait_after_a_bounded_number_of_bytes(autojump_clock):
    accepted = 0

    async def app(scope, receive, send):
        nonlocal accepted
        await send(START)
        async with trio.open_nursery() as nursery:

            async def pump():
                nonlocal accepted
                while True:
                    await send(body(b"x" * 1000))
                    accepted += 1000

            nursery.start_soon(pump)
            await until_disconnect(receive)
            nursery.cancel_scope.cancel()

    async with connected(app, send_timeout_s=30) as served:
        client = H2Client(served.client, window=0)
        client.request()
        await client.flush()
        async with reading(client):
            await trio.sleep(29)
            assert HIGH_WATER_BYTES - 1000 <= accepted <= HIGH_WATER_BYTES
            client.h2.increment_flow_control_window(200, 1)
            await client.flush()
            await trio.sleep(25)
            assert not any(isinstance(e, h2.events.StreamReset) for e in client.pending)


@pytest.mark.parametrize("ending", ["endless", "unfinished", "finished"])
async def test_a_stream_whose_window_stays_closed_is_reset_and_the_others_go_on(
    autojump_clock, ending
):
    causes = []

    async def app(scope, receive, send):
        if scope["path"] == "/":
            await finished(scope, receive, send)
            return
        app = {"endless": endless, "unfinished": unfinished, "finished": finished}[ending]
        await app(scope, receive, send)
        causes.append(scope["state"][RECORD_KEY].ended_by)

    async with connected(app, send_timeout_s=30) as served:
        client = H2Client(served.client, window=0)
        stuck = client.request(path="/stuck")
        await client.flush()
        events = await client.until(h2.events.StreamReset)
        assert events[-1].stream_id == stuck
        assert trio.current_time() == pytest.approx(30, abs=0.1)
        await trio.testing.wait_all_tasks_blocked()
        assert causes == [None if ending == "unfinished" else CancelCause.SLOW_CLIENT]
        assert served.record.ended_by is None
        other = client.request()
        client.h2.increment_flow_control_window(1000, other)
        events = await client.until(h2.events.StreamEnded)
        assert events[-1].stream_id == other
        with trio.move_on_after(200):
            await read_all(served.client)
        assert trio.current_time() == pytest.approx(30 + 75, abs=1)


async def test_a_connection_whose_only_stream_was_cut_ends_when_idle(autojump_clock):
    async with connected(endless, send_timeout_s=30, keep_alive_timeout_s=75) as served:
        client = H2Client(served.client, window=0)
        client.request()
        await client.until(h2.events.StreamReset)
        await read_all(served.client)
    assert trio.current_time() == pytest.approx(30 + 75, abs=1)


async def test_an_app_cancelled_in_its_last_send_leaves_no_stream_behind(autojump_clock):
    async def app(scope, receive, send):
        await send(START)
        with trio.move_on_after(1):
            await send(body(b"the end", more=False))

    async with connected(app, send_timeout_s=30) as served:
        client = H2Client(served.client, window=0)
        client.request()
        await client.until(h2.events.StreamReset)
    assert trio.current_time() == pytest.approx(31, abs=0.1)


async def test_streams_that_share_a_slow_socket_are_not_cut(autojump_clock):
    async def app(scope, receive, send):
        await send(START)
        await send(body(b"x" * 30_000, more=False))

    async with connected(app, send_timeout_s=30) as served:
        client = H2Client(served.client, window=2**24)
        client.h2.increment_flow_control_window(2**24)
        for _ in range(8):
            client.request()
        await client.flush()
        ended = 0
        while ended < 8:
            await trio.sleep(7)
            events = client.h2.receive_data(await served.client.receive_some(8192))
            ended += sum(isinstance(event, h2.events.StreamEnded) for event in events)
            assert not any(isinstance(event, h2.events.StreamReset) for event in events)
    assert trio.current_time() > 100


async def test_a_silent_http2_websocket_owes_no_body(autojump_clock):
    async def app(scope, receive, send):
        assert scope["type"] == "websocket"
        await send({"type": "websocket.accept"})
        await trio.sleep(100)

    async with connected(app, read_timeout_s=30, websocket_ping_interval_s=None) as served:
        client = H2Client(served.client)
        client.h2.send_headers(
            1,
            [
                (":method", "CONNECT"),
                (":protocol", "websocket"),
                (":path", "/"),
                (":scheme", "http"),
                (":authority", "x"),
                ("sec-websocket-version", "13"),
            ],
        )
        await client.until((h2.events.StreamEnded, h2.events.StreamReset))
        assert trio.current_time() == pytest.approx(100, abs=1)


async def test_the_end_of_a_connection_is_in_the_record_of_each_http2_stream(autojump_clock):
    causes = []

    async def app(scope, receive, send):
        await until_disconnect(receive)
        causes.append(scope["state"][RECORD_KEY].ended_by)

    async with connected(app) as served:
        client = H2Client(served.client)
        client.request()
        client.request()
        await client.flush()
        await trio.testing.wait_all_tasks_blocked()
        served.stream.abort(CancelCause.SHUTDOWN)
        await served.done.wait()
    assert causes == [CancelCause.SHUTDOWN] * 2


async def test_a_stalled_http2_upload_is_reset_at_the_read_timeout_and_the_others_go_on(
    autojump_clock,
):
    types = []

    async def app(scope, receive, send):
        if scope["method"] == "GET":
            await send(START)
            await trio.sleep(100)
            await send(body(b"late", more=False))
            return
        while not types or types[-1] == "http.request":
            types.append((await receive())["type"])

    async with connected(app, read_timeout_s=30) as served:
        client = H2Client(served.client)
        client.request()
        upload = client.request(method="POST", end_stream=False)
        await client.flush()
        await trio.sleep(20)
        client.h2.send_data(upload, b"some")
        events = await client.until(h2.events.StreamReset)
        assert events[-1].stream_id == upload
        assert trio.current_time() == pytest.approx(50, abs=0.1)
        await client.until(h2.events.StreamEnded)
    assert types == ["http.request", "http.disconnect"]


async def test_a_connection_whose_last_stream_the_client_reset_ends_when_idle(autojump_clock):
    async with connected(endless, keep_alive_timeout_s=75) as served:
        client = H2Client(served.client, window=0)
        stream_id = client.request()
        await client.flush()
        await trio.testing.wait_all_tasks_blocked()
        client.h2.reset_stream(stream_id)
        await client.flush()
        await read_all(served.client)
    assert trio.current_time() == pytest.approx(75, abs=1)


async def test_an_http2_response_is_ended_before_a_shutdown_closes_its_connection(autojump_clock):
    async def app(scope, receive, send):
        await send(START)
        await send(body(b"text"))
        await trio.sleep(1)
        served.context.terminated._event.set()
        await send(body(b"", more=False))

    for _ in range(10):
        async with connected(app) as served:
            client = H2Client(served.client)
            client.request()
            await client.until(h2.events.StreamEnded)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@given(
    lengths=st.lists(st.integers(0, 60), max_size=8),
    cuts=st.lists(st.integers(0, 700), max_size=8),
    limit=st.integers(0, 60),
)
def test_the_first_frame_over_the_limit_is_found_wherever_the_bytes_are_cut(lengths, cuts, limit):
    data = PREFACE + b"".join(
        length.to_bytes(3) + b"\xff" * 6 + b"\xff" * length for length in lengths
    )
    checked, allowed = FrameLengths(limit), True
    for start, end in pairwise([0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]):
        allowed = allowed and checked.allow(data[start:end])
    assert allowed is all(length <= limit for length in lengths)


@pytest.mark.slow
async def test_a_frame_longer_than_allowed_ends_the_connection_with_its_header(autojump_clock):
    async with connected(silent) as served:
        client = H2Client(served.client)
        await client.flush()
        await served.client.send_all((2**14 + 1).to_bytes(3) + bytes(6))
        *_, last = client.h2.receive_data(await read_all(served.client))
        assert last.error_code == h2.errors.ErrorCodes.FRAME_SIZE_ERROR
    assert trio.current_time() < 1


async def test_a_preface_with_nothing_behind_is_an_idle_connection(autojump_clock):
    async with connected(silent, keep_alive_timeout_s=20) as served:
        await served.client.send_all(PREFACE)
        await read_all(served.client)
        assert trio.current_time() == pytest.approx(20)


async def test_a_connection_without_a_stream_is_idle_and_with_one_is_not(autojump_clock):
    async with connected(silent, keep_alive_timeout_s=20) as served:
        client = H2Client(served.client)
        stream_id = client.request()
        await client.flush()
        await trio.sleep(100)
        client.h2.reset_stream(stream_id)
        await client.flush()
        await read_all(served.client)
        assert trio.current_time() == pytest.approx(120)
