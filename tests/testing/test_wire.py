"""The whole server without a socket: what a client meets on the wire, to the second."""

from __future__ import annotations

import h2.events
import pytest
import trio
from tests.server.connecting import (
    GET,
    UPGRADE,
    H2Client,
    endless,
    finished,
    unfinished,
    until_disconnect,
)
from tests.server.reading import CHAT, STREAM, chunks, text
from trio.testing import wait_all_tasks_blocked

from triolet.config import Config
from triolet.core import CancelCause
from triolet.server.connection import RECORD_KEY
from triolet.server.listen import ListenOptions
from triolet.testing.engine import ScriptedBackend, say, serve_script
from triolet.testing.pipe import open_pipe
from triolet.testing.streams import Cut, Delay, Dribble, HalfClose, Reset, Stall
from triolet.testing.wire import (
    CLIENT_NAME,
    SERVER_NAME,
    PipeTransport,
    open_wire,
    open_wire_server,
)
from triolet.testing.wire_client import http_request

PATH = "/v1/chat/completions"


def held(runtime):
    statistics = runtime.backend().statistics()
    return statistics.used_blocks, statistics.used_rows, runtime.live_requests


async def test_a_response_is_read_and_the_connection_used_again(autojump_clock):
    async with open_wire(finished) as wire:
        client = wire.connect()
        for _ in range(2):
            await client.request("GET", "/")
            response = await client.read_response()
            assert (response.status, response.body) == (200, b"half of an answer")
            assert response.complete
        assert wire.open_connections == 1
        client.leave()
        await wait_all_tasks_blocked()
        assert wire.open_connections == 0


async def test_pipelined_responses_are_read_one_by_one(autojump_clock):
    async with open_wire(finished) as wire:
        client = wire.connect()
        await client.send(GET + GET)
        assert [(await client.read_response()).complete for _ in range(2)] == [True, True]


async def test_a_response_that_is_cut_is_not_complete(autojump_clock):
    async with open_wire(unfinished) as wire:
        client = wire.connect()
        await client.send(GET)
        response = await client.read_response()
        assert (response.body, response.complete) == (b"half of an answer", False)
        with pytest.raises(trio.EndOfChannel):
            await client.read_response()


async def test_an_app_sees_the_names_of_both_ends(autojump_clock):
    scopes = []

    async def app(scope, receive, send):
        scopes.append(scope)
        await finished(scope, receive, send)

    async with open_wire(app) as wire:
        client = wire.connect()
        await client.request("POST", "/path?a=b", json_body={}, headers={"X-Test": "1"})
        await client.read_response()
    (scope,) = scopes
    assert (scope["client"], scope["server"]) == (CLIENT_NAME, SERVER_NAME)
    assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/path", b"a=b")
    assert (b"x-test", b"1") in scope["headers"]
    assert (b"content-length", b"2") in scope["headers"]


async def test_who_does_not_read_is_reset_after_the_send_timeout_to_the_second(autojump_clock):
    causes = []

    async def app(scope, receive, send):
        await endless(scope, receive, send)
        causes.append(scope["state"][RECORD_KEY].ended_by)

    async with open_wire(app, ListenOptions(send_timeout_s=30)) as wire:
        client = wire.connect(capacity_bytes=10_000)
        await client.send(GET)
        await wait_all_tasks_blocked()
        start = trio.current_time()
        await trio.sleep(29.9)
        assert client.record.ended_by is None
        await trio.sleep(0.2)
        assert client.record.ended_by is CancelCause.SLOW_CLIENT
        assert causes == [CancelCause.SLOW_CLIENT]
        with pytest.raises(trio.BrokenResourceError):
            await client.receive()
        assert trio.current_time() - start == pytest.approx(30.1)


async def test_who_reads_slowly_is_not(autojump_clock):
    async with open_wire(endless, ListenOptions(send_timeout_s=30)) as wire:
        client = wire.connect(receiving=[Dribble(1000), Delay(29)], capacity_bytes=10_000)
        await client.send(GET)
        for _ in range(50):
            assert await client.receive()
        assert client.record.ended_by is None


@pytest.mark.parametrize(
    "fault", [Reset(500), Cut(500), Stall(500)], ids=lambda f: type(f).__name__
)
async def test_however_a_client_is_lost_its_app_ends(autojump_clock, fault):
    ended = trio.Event()

    async def app(scope, receive, send):
        await endless(scope, receive, send)
        ended.set()

    async with open_wire(app) as wire:
        client = wire.connect(receiving=[fault])
        await client.send(GET)
        with trio.move_on_after(1000):
            assert not (await client.read_response()).complete
        await ended.wait()
        await wait_all_tasks_blocked()
        assert wire.open_connections == 0


async def test_a_request_may_come_byte_by_byte(autojump_clock):
    async with open_wire(finished) as wire:
        client = wire.connect(sending=[Dribble(1), Delay(0.1)])
        await client.send(GET)
        assert (await client.read_response()).complete
    assert trio.current_time() == pytest.approx(len(GET) * 0.1)


async def test_half_a_body_ends_at_the_read_timeout(autojump_clock):
    async def app(scope, receive, send):
        await until_disconnect(receive)

    async with open_wire(app, ListenOptions(read_timeout_s=20)) as wire:
        client = wire.connect(sending=[Stall(90)])
        with trio.move_on_after(20.1):
            await client.request("POST", "/", body=b"x" * 100)
        assert wire.open_connections == 0
        assert trio.current_time() == pytest.approx(20.1)


async def test_an_idle_connection_ends_at_the_keep_alive_timeout(autojump_clock):
    async with open_wire(finished, ListenOptions(keep_alive_timeout_s=75)) as wire:
        client = wire.connect()
        assert await client.receive() == b""
        assert trio.current_time() == pytest.approx(75)


async def test_who_has_half_closed_still_gets_the_answer_it_waits_for(autojump_clock):
    async with open_wire(finished) as wire:
        client = wire.connect(sending=[HalfClose(len(GET))])
        await client.send(GET)
        assert await client.receive()


async def test_connections_over_the_bound_are_reset(autojump_clock):
    async with open_wire(finished, ListenOptions(max_connections=1)) as wire:
        first, second = wire.connect(), wire.connect()
        with pytest.raises(trio.BrokenResourceError):
            await second.receive()
        assert second.record.ended_by is CancelCause.SHUTDOWN
        await first.send(GET)
        assert (await first.read_response()).complete
        first.leave()
        await wait_all_tasks_blocked()
        third = wire.connect()
        await third.send(GET)
        assert (await third.read_response()).complete


async def test_leaving_resets_what_outlasts_the_grace(autojump_clock):
    async with open_wire(endless, ListenOptions(graceful_timeout_s=2)) as wire:
        client = wire.connect(capacity_bytes=1000)
        await client.send(GET)
        await wait_all_tasks_blocked()
    assert trio.current_time() == pytest.approx(2)
    assert client.record.ended_by is CancelCause.SHUTDOWN


async def test_http2_is_spoken_by_whoever_brings_a_parser(autojump_clock):
    async with open_wire(finished) as wire:
        client = H2Client(wire.connect().stream)
        client.request()
        events = await client.until(h2.events.StreamEnded)
        assert any(isinstance(one, h2.events.ResponseReceived) for one in events)


async def test_a_websocket_is_spoken_too(autojump_clock):
    async def app(scope, receive, send):
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "hello"})
        await until_disconnect(receive)

    async with open_wire(app) as wire:
        client = wire.connect()
        await client.send(UPGRADE)
        data = b""
        while b"hello" not in data:
            data += await client.receive()
        assert data.startswith(b"HTTP/1.1 101")


async def test_triolet_streams_over_the_wire(autojump_clock):
    async with open_wire_server(serve_script(ScriptedBackend(say("abc"), step_s=1))) as server:
        client = server.wire.connect()
        await client.request("POST", PATH, json_body=STREAM)
        status, headers = await client.read_head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert "chat.completion.chunk" in (await client.next_event()).data
        while (await client.next_event()).data != "[DONE]":
            pass
        with pytest.raises(trio.EndOfChannel):
            await client.next_event()
        assert text(chunks(await client.read_response())) == "abc"
        client.leave()
        await wait_all_tasks_blocked()
        assert held(server.runtime) == (0, 0, 0)


async def test_a_reset_client_frees_its_request_at_once(autojump_clock):
    served = serve_script(ScriptedBackend(say("abc " * 1000), step_s=1))
    async with open_wire_server(served) as server:
        client = server.wire.connect()
        await client.request("POST", PATH, json_body=STREAM)
        await client.next_event()
        assert held(server.runtime)[2] == 1
        client.reset()
        await wait_all_tasks_blocked()
        assert held(server.runtime) == (0, 0, 0)


@pytest.mark.slow
async def test_a_stuck_client_is_cut_and_recorded_as_slow(autojump_clock):
    served = serve_script(ScriptedBackend(say("abc " * 2000), step_s=0.01))
    config = Config(send_timeout=5, max_stream_buffer=2048)
    records = []
    async with open_wire_server(served, config) as server:
        books = server.runtime.on_record
        server.runtime.on_record = lambda record: (records.append(record), books(record))
        client = server.wire.connect(capacity_bytes=4096)
        await client.request("POST", PATH, json_body=STREAM)
        await client.next_event()
        await trio.sleep(60)
        assert held(server.runtime) == (0, 0, 0)
        assert [record.outcome for record in records] == ["cancelled:slow_client"]
        healthy = server.wire.connect()
        await healthy.request("POST", PATH, json_body={**CHAT, "max_tokens": 3})
        assert (await healthy.read_response()).status == 200


async def test_two_senders_at_once_are_refused_as_on_a_socket(autojump_clock):
    ours, theirs = open_pipe(10)
    transport = PipeTransport(ours, send_timeout_s=30)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(transport.send_all, b"x" * 30)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await transport.send_all(b"y")
        with pytest.raises(trio.BusyResourceError):
            await transport.send_eof()
        nursery.cancel_scope.cancel()
    await transport.aclose()
    for send in (transport.send_all(b"x"), transport.wait_send_all_might_not_block()):
        with pytest.raises(trio.ClosedResourceError):
            await send
    with pytest.raises(OSError, match="not connected"):
        transport.names()
    assert theirs.unread_bytes == 10


def test_a_request_can_be_built_to_be_sent_in_pieces():
    assert http_request("GET", "/", headers={"Host": "h"}) == b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"
