"""Bytes behind an HTTP/1.1 request."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from tests.server.connecting import GET, START, body, connected, read_all, silent, until_disconnect

from triolet.server.protocol import HELD_BYTES, Protocol


@pytest.mark.parametrize("behind", [b"\r\n", GET, GET + b"x" * 1000], ids=["line", "get", "more"])
async def test_a_client_that_leaves_is_noticed_behind_a_stray_byte(autojump_clock, behind):
    async with connected(silent) as served:
        await served.client.send_all(GET + behind)
        await trio.testing.wait_all_tasks_blocked()
        await served.client.aclose()
        await served.done.wait()
    assert trio.current_time() < 1


@pytest.mark.parametrize("pause", [0, 1], ids=["at once", "late"])
async def test_pipelined_requests_are_answered_in_order(autojump_clock, pause):
    async def app(scope, receive, send):
        if pause:
            await trio.sleep(pause)
        await send({**START, "headers": [(b"content-length", b"2")]})
        await send(body(scope["path"].encode(), more=False))

    requests = [GET.replace(b"/ ", b"/%d " % i) for i in range(5)]
    requests[-1] = requests[-1][:-2] + b"Connection: close\r\n\r\n"
    async with connected(app) as served:
        for request in (requests[0] + requests[1], requests[2], requests[3] + requests[4]):
            await served.client.send_all(request[:-7])
            await trio.sleep(0.1)
            await served.client.send_all(request[-7:])
        data = await read_all(served.client)
    assert [part[:2] for part in data.split(b"\r\n\r\n")[1:]] == [b"/%d" % i for i in range(5)]


async def test_a_response_that_ends_while_the_reader_is_busy_resumes_it(
    autojump_clock, monkeypatch
):
    handle = Protocol.handle

    async def handle_slowly(self, event):
        await handle(self, event)
        await trio.sleep(1)

    async def app(scope, receive, send):
        await trio.sleep(0.5)
        await send({**START, "headers": [(b"content-length", b"0")]})
        await send(body(b"", more=False))

    monkeypatch.setattr(Protocol, "handle", handle_slowly)
    async with connected(app) as served:
        await served.client.send_all(GET + GET)
        answers = b""
        with trio.fail_after(10):
            while answers.count(b"HTTP/1.1 200") < 2:
                answers += await served.client.receive_some(65_536)


async def test_what_waits_behind_a_request_is_bounded_and_not_lost(autojump_clock):
    size, got = 5 * HELD_BYTES, []
    answer = trio.Event()

    async def app(scope, receive, send):
        if scope["method"] == "GET":
            await answer.wait()
        while (message := await receive()).get("more_body"):
            got.append(len(message["body"]))
        await send({**START, "headers": [(b"content-length", b"0")]})
        await send(body(b"", more=False))

    async with connected(app) as served, trio.open_nursery() as nursery:
        head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        data = GET + head % size + b"x" * size
        nursery.start_soon(served.client.send_all, data)
        await trio.sleep(1)
        assert served.protocol_holds() <= 2 * HELD_BYTES
        answer.set()
        assert (await read_all(served.client)).count(b"HTTP/1.1 200") == 2
    assert sum(got) == size


async def test_a_request_that_was_whole_when_the_client_closed_is_still_handled(autojump_clock):
    paths = []

    async def app(scope, receive, send):
        paths.append(scope["path"])
        await until_disconnect(receive)

    async with connected(app) as served:
        await served.client.send_all(GET)
        await served.client.aclose()
        await served.done.wait()
    assert paths == ["/"]
