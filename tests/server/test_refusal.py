"""What is refused below the app."""

from __future__ import annotations

import json
from contextlib import suppress

import h2.events
import pytest
import trio
from tests.server.connecting import (
    GET,
    MASKED_PING,
    UPGRADE,
    H2Client,
    connected,
    finished,
    read_all,
    until_disconnect,
)


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


@pytest.mark.parametrize(
    ("sent", "status", "word"),
    [
        (b"nonsense\r\n\r\n", 400, "request line"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nsecret evil\r\n\r\n", 400, "header"),
        (GET[:-2] + b"Content-Length: -1\r\n\r\n", 400, "Content-Length"),
        (GET[:-2] + b"Transfer-Encoding: gzip\r\n\r\n", 501, "chunked"),
        (GET[:-2] + b"x: evil\r\n" * 4000, 431, "longer"),
        (UPGRADE.replace(b": 13", b": 99"), 400, "WebSocket"),
    ],
    ids=["line", "host", "header", "length", "encoding", "long", "websocket"],
)
async def test_what_is_refused_below_the_app_is_told_why_in_json(
    autojump_clock, sent, status, word
):
    async with connected(finished) as served:
        with suppress(trio.BrokenResourceError):
            await served.client.send_all(sent)
        head, _, content = (await read_all(served.client)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d" % status)
    assert b"x-request-id: " in head
    error = json.loads(content)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "invalid_request"
    assert word in error["message"]
    assert b"evil" not in content


async def test_an_app_that_refuses_a_websocket_can_say_why(autojump_clock):
    async def app(scope, receive, send):
        await send({"type": "websocket.http.response.start", "status": 404, "headers": []})
        await send({"type": "websocket.http.response.body", "body": b"not here"})

    async with connected(app) as served:
        await served.client.send_all(UPGRADE)
        data = await read_all(served.client)
    assert data.startswith(b"HTTP/1.1 404")
    assert b"not here" in data


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_an_app_that_answers_nothing_is_a_server_error_in_json(autojump_clock, method):
    async def app(scope, receive, send):
        await trio.lowlevel.checkpoint()

    async with connected(app) as served:
        await served.client.send_all(GET.replace(b"GET", method.encode()))
        head, _, content = (await read_all(served.client)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500")
    assert bool(content) == (method == "GET")
    assert not content or json.loads(content)["error"]["type"] == "server_error"
    async with connected(app) as served:
        client = H2Client(served.client)
        client.request(method=method)
        events = await client.until(h2.events.StreamEnded)
    text = b"".join(e.data for e in events if isinstance(e, h2.events.DataReceived))
    assert bool(text) == (method == "GET")
