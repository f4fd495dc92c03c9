"""A catalogue of what clients and networks do, against both ways to serve.

Each test says what the fault is, what its client sees, what is freed by when, and how the
metrics count it. What the plain ``hypercorn`` command cannot promise is in
:mod:`tests.live.test_hypercorn_command`; many clients at once are in
:mod:`tests.live.test_crowds`; the same on an app without an engine, WebSockets too, is in
:mod:`tests.live.test_hazards`.
"""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack

import pytest
from tests.live.fronts import (
    BUSY_S,
    FIRST,
    KEEP_ALIVE_TIMEOUT_S,
    REQUEST_TIMEOUT_S,
    SEND_TIMEOUT_S,
    SHORT,
    STEP_S,
    STREAM,
    WHOLE,
    Http2Client,
    all_at_once,
    all_free,
    connect_tls,
    ended,
    stuck_clients,
    trickle,
)
from tests.live.processes import connect, poll, post, read_to, read_to_end, reset_on_close
from tests.live.test_hazards import KILLERS, UPGRADE

pytestmark = [pytest.mark.live, pytest.mark.slow]

DISCONNECT = {"cancelled:disconnect": 1}
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200


def read_quietly(client):
    """What a client still gets; a reset instead of an end is as good."""
    try:
        return read_to_end(client)
    except ConnectionError:
        return b""


# Clients that leave


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("when", ["at once", "in mid-stream"])
def test_a_client_that_leaves(front, tls, how, when):
    """All that its request held is free within a step; it counts as a disconnect."""
    server = front.tls if tls else front.plain
    reach = connect_tls if tls else connect
    with all_free(server, DISCONNECT, within=STEP_S), reach(server.address) as client:
        client.sendall(post(STREAM))
        if when == "in mid-stream":
            read_to(client, FIRST)
        else:
            poll(server.held, "request")
        if how == "reset":
            reset_on_close(client)


@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])
def test_a_client_that_closes_its_side_only(front, body):
    """Half-close: a disconnect like any other.

    TCP shows the server the same FIN for "I have said all" and "I have gone", and a model must
    not run for the gone. The client sees the end of the connection, and never a success.
    """
    with all_free(front.plain, DISCONNECT, within=STEP_S), connect(front.plain.address) as client:
        client.sendall(post(body))
        poll(front.plain.held, "request")
        client.shutdown(socket.SHUT_WR)
        received = read_quietly(client)
    assert b"[DONE]" not in received
    assert not received.endswith(b"0\r\n\r\n")


def test_a_stream_that_its_http2_client_resets(front):
    """RST_STREAM: this stream is a disconnect, and the connection answers the next request."""
    with (
        all_free(front.tls, {**DISCONNECT, "finished": 1}, within=1),
        connect_tls(front.tls.address, alpn="h2") as sock,
    ):
        client = Http2Client(sock)
        left = client.post(STREAM)
        poll(front.tls.held, "request")
        client.h2.reset_stream(left)
        status, content = client.answer(client.post(SHORT))
    assert status == 200
    assert content.endswith(b"data: [DONE]\n\n")


# Clients that do not read


def test_clients_that_stop_reading(triolet_serve):
    """Zero window: plain, under TLS, on HTTP/2. A stream beside them goes on.

    All is free within the send timeout and two seconds, and each counts as a slow client.
    (For WebSockets see tests/live/test_hazards.py.)
    """
    front = triolet_serve
    with (
        ExitStack() as stack,
        connect(front.plain.address) as healthy,
        all_free(front.tls, {"cancelled:slow_client": 2}, within=SEND_TIMEOUT_S + 2),
    ):
        before = front.plain.numbers()
        stuck_clients(front, stack)
        healthy.sendall(post(STREAM))
        counted = poll(
            lambda: ended(front.plain, before), "end", within=SEND_TIMEOUT_S + 2 + BUSY_S
        )
        assert counted == {"cancelled:slow_client": 1}
        received = read_to(healthy, FIRST) + healthy.recv(65_536)
        assert b"error" not in received
    poll(lambda: not front.plain.held(), "free blocks")


# Requests that come oddly


def test_a_request_that_comes_byte_by_byte(front):
    """It is answered like any other."""
    with all_free(front.plain, {"finished": 1}, within=1), connect(front.plain.address) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in post(SHORT):
            client.sendall(bytes([number]))
        assert b'"text":"a"' in read_to(client, b"[DONE]")


def test_requests_sent_behind_each_other(front):
    """Pipelining: all are answered, in their order."""
    requests = b"".join(post({**WHOLE, "max_tokens": number}) for number in range(1, 21))
    with all_free(front.plain, {"finished": 20}, within=1), connect(front.plain.address) as client:
        client.sendall(requests)
        received = b""
        while received.count(b'"usage"') < 20:
            received += client.recv(65_536)
    marks = [received.index(b'"completion_tokens":%d,' % number) for number in range(1, 21)]
    assert marks == sorted(marks)


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])
def test_a_client_that_leaves_behind_pipelined_requests(triolet_serve, body, how):
    """It is noticed as fast as any other, and the request behind never begins."""
    server = triolet_serve.plain
    with all_free(server, DISCONNECT, within=STEP_S), connect(server.address) as client:
        client.sendall(post(body) * 2)
        poll(server.held, "request")
        if how == "reset":
            reset_on_close(client)


def test_requests_that_trickle_in(triolet_serve, hypercorn):
    """Slow loris: headers get the keep-alive timeout in all, a body the request timeout.

    The first is hung up on; the second is told 504 and counts as a timeout; an idle connection
    costs no more than the first.
    """
    request = post(STREAM)
    head = b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 500

    def try_one(front):
        before = front.plain.numbers()
        headers, body, idle = all_at_once(
            lambda: trickle(front.plain.address, [bytes([one]) for one in head], every_s=0.2),
            lambda: trickle(
                front.plain.address,
                [request[:-40], *(bytes([one]) for one in request[-40:])],
                every_s=0.5,
            ),
            lambda: trickle(front.plain.address, [], every_s=0.2),
        )
        return headers, body, idle, ended(front.plain, before)

    for headers, body, idle, counted in all_at_once(
        lambda: try_one(triolet_serve), lambda: try_one(hypercorn)
    ):
        for seconds, received in (headers, idle):
            assert KEEP_ALIVE_TIMEOUT_S - 1 < seconds < KEEP_ALIVE_TIMEOUT_S + BUSY_S
            assert not received
        seconds, received = body
        assert REQUEST_TIMEOUT_S - 1 < seconds < REQUEST_TIMEOUT_S + 1 + BUSY_S
        assert received.startswith(b"HTTP/1.1 504 ")
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"
        assert counted == {"cancelled:timeout": 1}


# Other protocols


def test_tls_to_the_plain_port_and_the_other_way_round(front):
    """The one gets a 400, the other its end; the next client notices nothing."""
    with connect(front.plain.address) as client:
        client.sendall(TLS_HELLO)
        assert read_quietly(client).startswith(b"HTTP/1.1 400 ")
    with connect(front.tls.address) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP/1.1" not in read_quietly(client)
    for server in (front.plain, front.tls):
        assert server.ask("GET", "/health").status == 200


JUNK = {
    **KILLERS,
    "websocket to an endpoint without one": [
        UPGRADE % b"/v1/completions",
        b"\x81\x85\0\0\0\0hello",
    ],
    "junk behind a request": [post(SHORT), b"\xff" * 1000],
    "a frame of 16 MiB": [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\xff" * 9],
    "nothing behind a preface": [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
}


def test_junk_before_and_behind_upgrades(triolet_serve):
    """Each connection ends by itself within the keep-alive timeout; a stream beside goes on."""
    server = triolet_serve.plain

    def throw(parts):
        with connect(server.address) as client:
            for part in parts:
                try:
                    client.sendall(part)
                except OSError:
                    break
            client.settimeout(KEEP_ALIVE_TIMEOUT_S + BUSY_S)
            read_quietly(client)

    with connect(server.address) as beside:
        beside.sendall(post(STREAM))
        read_to(beside, FIRST)
        all_at_once(*(lambda parts=parts: throw(parts) for parts in JUNK.values()))
        assert b"data: {" in beside.recv(65_536)
    poll(lambda: not server.held(), "free blocks")


@pytest.mark.parametrize(
    ("path", "length", "status"),
    [("/v1/completions", 99_999_999, 413), ("/nothing", 1000, 404)],
    ids=["too large", "not found"],
)
def test_an_answer_before_the_body(triolet_serve, path, length, status):
    """HTTP/2: the refusal comes at once, and the connection goes on, body or no body."""
    headers = ("content-type", "application/json"), ("content-length", str(length))
    with connect(triolet_serve.plain.address) as sock:
        client = Http2Client(sock)
        for _ in range(3):
            early = client.request("POST", path, *headers, end=False)
            assert client.answer(early)[0] == status
            client.h2.send_data(early, b"x" * 100)
            answer, content = client.answer(client.post(SHORT))
            assert (answer, content[-14:]) == (200, b"data: [DONE]\n\n")
