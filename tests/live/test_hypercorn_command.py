"""The app under the plain ``hypercorn`` command, configured by the environment.

What it promises as ``triolet serve`` does is in :mod:`tests.live.test_faults`. Here is what it
does where it cannot: tests that pin a weakness, so that we notice once it is gone.
"""

from __future__ import annotations

import signal
import subprocess
from contextlib import ExitStack

import pytest
from tests.live.fronts import (
    BUSY_S,
    FIRST,
    HYPERCORN,
    KEEP_ALIVE_TIMEOUT_S,
    REQUEST_TIMEOUT_S,
    SETTINGS,
    SHORT,
    SMALL_WINDOW,
    STREAM,
    WHOLE,
    Http2Client,
    ended,
    stuck_clients,
)
from tests.live.processes import LOAD_PATIENCE_S, connect, poll, post, read_to, read_to_end
from tests.live.test_hazards import KILLERS

pytestmark = [pytest.mark.live, pytest.mark.slow]


def test_it_streams_and_stops(start_process):
    server = start_process(
        *HYPERCORN,
        TRIOLET_ENGINE="scripted",
        TRIOLET_SCRIPTED_TEXT="Hello 👋",
        TRIOLET_API_KEY="a-key",
    )
    server.wait_listening()
    server.wait_ready()
    body = {"model": "scripted", "prompt": "x", "stream": True}
    request = post(body).replace(b"\r\n", b"\r\nAuthorization: Bearer a-key\r\n", 1)
    with connect(server.address) as client:
        client.sendall(request)
        received = read_to(client, b"[DONE]")
        # The connection is reused, then closed as asked.
        client.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        received += read_to_end(client)
    assert received.count(b"HTTP/1.1 200") == 2
    assert received.count(b"data: [DONE]") == 2
    assert server.ask("GET", "/v1/models").status == 401
    assert not server.held()
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 0


@pytest.mark.model
def test_it_serves_the_real_model(start_process):
    server = start_process(*HYPERCORN)
    server.wait_listening()
    assert server.ask("GET", "/ready").status == 503
    server.wait_ready(LOAD_PATIENCE_S)
    model = server.ask("GET", "/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 4}
    assert "Paris" in server.ask("POST", "/v1/completions", body).json()["choices"][0]["text"]
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 0


def test_what_only_the_request_timeout_ends(hypercorn):
    """Clients that stop reading, and one that left behind a request it had sent in advance.

    Hypercorn shields its sends without a deadline, and reads no further than the next request.
    So the first never count as slow clients; the leaving of the last is seen after its answer,
    and the request behind is begun for nobody.
    """
    plain, tls = hypercorn.plain, hypercorn.tls
    before = plain.numbers(), tls.numbers()
    with ExitStack() as stack:
        stuck_clients(hypercorn, stack)
        with connect(plain.address) as client:
            client.sendall(post(WHOLE) * 2)
            poll(lambda: plain.held().get("triolet_requests_live") == 2, "requests")
        poll(lambda: not tls.held(), "free blocks", within=REQUEST_TIMEOUT_S + BUSY_S)
    poll(lambda: not plain.held(), "free blocks", within=REQUEST_TIMEOUT_S + BUSY_S)
    assert ended(plain, before[0]) == {"cancelled:timeout": 2, "cancelled:disconnect": 1}
    assert ended(tls, before[1]) == {"cancelled:timeout": 2}


def test_a_preface_alone_holds_a_connection_for_ever(hypercorn):
    with connect(hypercorn.plain.address) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        client.settimeout(KEEP_ALIVE_TIMEOUT_S + 1)
        with pytest.raises(TimeoutError):
            read_to_end(client)


def test_a_body_behind_its_answer_ends_the_whole_http2_connection(hypercorn):
    with connect(hypercorn.plain.address) as sock:
        client = Http2Client(sock)
        early = client.request("POST", "/nothing", ("content-length", "1000"), end=False)

        def go_on():
            client.answer(early)
            client.h2.send_data(early, b"x" * 100)
            client.answer(client.post(SHORT))

        with pytest.raises(ConnectionError):
            go_on()


def test_one_client_ends_the_server_and_the_exit_code_says_nothing(start_process):
    server = start_process(*HYPERCORN, traceback=True, **SETTINGS)
    server.wait_listening()
    server.wait_ready()
    with connect(server.address) as beside, connect(server.address) as client:
        beside.sendall(post(STREAM))
        received = read_to(beside, FIRST)
        client.sendall(*KILLERS["websocket frame before the 101"])
        received += read_to_end(beside)
    assert b"error" not in received
    assert server.wait_exit() == 0


def test_a_stop_cuts_streams_without_a_word_and_a_stuck_client_holds_it(start_process):
    """The drain timeout means nothing here: Hypercorn's graceful timeout comes first."""
    server = start_process(
        *HYPERCORN[:-1], "--graceful-timeout", "1", *HYPERCORN[-1:],
        **{**SETTINGS, "TRIOLET_DRAIN_TIMEOUT": "0", "TRIOLET_REQUEST_TIMEOUT": "2"},
    )  # fmt: skip
    server.wait_listening()
    server.wait_ready()
    with connect(server.address, window=SMALL_WINDOW) as stuck:
        stuck.sendall(post(STREAM))
        poll(lambda: "cancelled:timeout" in server.log(), "end of the request")
        with connect(server.address) as beside:
            beside.sendall(post(STREAM))
            read_to(beside, FIRST)
            server.signal(signal.SIGTERM)
            received = read_to_end(beside)
        assert b"error" not in received
        assert b"[DONE]" not in received
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait_exit(1 + 2)
    assert server.wait_exit() == 0
