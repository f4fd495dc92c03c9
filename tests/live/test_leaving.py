"""Clients that leave behind bytes that nobody has looked at yet. On real sockets, with TLS."""

from __future__ import annotations

import socket
import struct

import pytest
import trio
import trio.testing
from tests.live.test_hazards import App, running
from tests.live.test_hazards import certificate as certificate  # noqa: PLC0414 (a fixture)

from triolet.server.deadline_stream import RECORD_KEY

pytestmark = [pytest.mark.live, pytest.mark.slow]

SILENT = b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n"
ANSWERED = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
RESET = struct.pack("ii", 1, 0)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
async def test_a_stray_byte_does_not_hide_that_a_client_has_left(
    tls, reset, certificate, monkeypatch
):
    async def say_nothing(self, scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass
        self.causes.append(scope["state"][RECORD_KEY].ended_by)
        self.ended.set()

    monkeypatch.setattr(App, "endless", say_nothing)
    async with running(certificate if tls else None, max_connections=1) as server:
        client = await server.connect()
        await client.send_all(SILENT + b"\r\n")
        await trio.testing.wait_all_tasks_blocked(0.05)
        if reset:
            sock = (client.transport_stream if tls else client).socket
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        start = trio.current_time()
        await trio.aclose_forcefully(client)
        await server.app.ended.wait()
        assert trio.current_time() - start < 0.5
        assert server.app.causes == [None]


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_pipelined_requests_are_answered_in_order_and_whole(tls, certificate):
    async with running(certificate if tls else None) as server:
        client = await server.connect()
        await client.send_all(ANSWERED * 20)
        answers = b""
        with trio.fail_after(5):
            while answers.count(b"well") < 20:
                answers += await client.receive_some(65_536)
        assert answers.count(b"HTTP/1.1 200") == 20
        await trio.aclose_forcefully(client)
