"""Contract §10: how the process starts and stops, and with which exit code."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time

import pytest
from tests.live.processes import (
    LOAD_PATIENCE_S,
    SERVE,
    connect,
    poll,
    post,
    read_to,
    read_to_end,
)

from triolet.wire.sse import SseDecoder

pytestmark = pytest.mark.live

#: The contract's bound on the exit after the drain timeout, and what a busy machine may add.
EXIT_S, BUSY_S = 2, 5
#: Some forty seconds of text.
LONG = ("--scripted-text", "ab " * 5000, "--scripted-step-ms", "10")
STREAM = {"model": "scripted", "prompt": "hi", "stream": True, "max_tokens": 4000}
FIRST = b'"text":"a"'
SIGNALS = [signal.SIGTERM, signal.SIGINT]

DYING_ENGINE = """
import sys
import trio
from triolet.cli import serve
from triolet.config import Config
from triolet.runtime.lifecycle import Runtime
from triolet.testing.engine import ScriptedBackend, say, serve_script

async def load():
    await trio.lowlevel.checkpoint()
    return serve_script(ScriptedBackend(say("abcdef"), step_s=0.05, die_after_steps=3))

serve.create_runtime = lambda _: Runtime(
    load,
    max_live_requests=4,
    max_undelivered_bytes=65536,
    max_request_timeout_s=600,
    drain_timeout_s=60,
)
sys.exit(serve.run(Config(port=0)))
"""


def last_event(received):
    """The last event of a chunked stream, read as a client does that sees raw bytes."""
    lines = [line for line in received.split(b"\r\n") if line.startswith((b"data:", b": "))]
    decoder = SseDecoder()
    return json.loads(decoder.feed(b"".join(lines))[-1].data)


def assert_cut(received, code):
    """The stream ended in an error event and without what a success ends with."""
    assert last_event(received)["error"]["code"] == code
    assert b"[DONE]" not in received
    assert not received.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_drains_and_the_exit_is_clean_and_on_time(start_scripted, number):
    server = start_scripted("--drain-timeout", "1", *LONG)
    with connect(server.address) as client:
        client.sendall(post(STREAM))
        read_to(client, FIRST)
        server.signal(number)
        started = time.monotonic()
        poll(lambda: server.ask("GET", "/ready").status == 503, "drain")
        refused = server.ask("POST", "/v1/completions", {**STREAM, "stream": False})
        assert server.ask("GET", "/health").status == 200
        received = read_to_end(client)
    assert server.wait_exit() == 0
    assert 1 <= time.monotonic() - started < 1 + EXIT_S + BUSY_S
    assert_cut(received, "shutdown")
    assert (refused.status, refused.json()["error"]["code"]) == (503, "draining")
    assert int(refused.headers["retry-after"]) >= 1


def test_a_stream_that_ends_in_time_ends_well_and_ends_the_drain(start_scripted):
    server = start_scripted(
        "--drain-timeout", "600", "--scripted-text", "ab" * 20, "--scripted-step-ms", "20"
    )
    with connect(server.address) as client:
        client.sendall(post(STREAM))
        received = read_to(client, FIRST)
        server.signal(signal.SIGTERM)
        received += read_to_end(client)
    assert server.wait_exit() == 0
    assert b"data: [DONE]" in received
    assert received.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_second_signal_ends_all_at_once(start_scripted, number):
    server = start_scripted("--drain-timeout", "600", *LONG)
    with connect(server.address) as client:
        client.sendall(post(STREAM))
        read_to(client, FIRST)
        server.signal(number)
        poll(lambda: server.ask("GET", "/ready").status == 503, "drain")
        server.signal(number)
        started = time.monotonic()
        assert_cut(read_to_end(client), "shutdown")
    assert server.wait_exit() == 0
    assert time.monotonic() - started < EXIT_S + BUSY_S


def test_a_client_that_does_not_read_cannot_hold_the_exit(start_scripted):
    server = start_scripted(
        "--drain-timeout", "1", "--max-stream-buffer", "4096", "--socket-send-buffer", "4096",
        "--scripted-text", "ab " * 5000, "--scripted-step-ms", "1",
    )  # fmt: skip
    with connect(server.address, window=2048) as client:
        client.sendall(post(STREAM))
        # Paused by its unread output: the sockets' buffers are full.
        poll(lambda: server.held().get("triolet_engine_sequences_paused"), "pause")
        server.signal(signal.SIGTERM)
        started = time.monotonic()
        assert server.wait_exit() == 0
        assert time.monotonic() - started < 1 + EXIT_S + BUSY_S


def test_an_idle_server_stops_at_once_whatever_connections_are_open(start_scripted):
    server = start_scripted("--drain-timeout", "600")
    with connect(server.address) as idle, connect(server.address) as half:
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        read_to(idle, b"}")
        half.sendall(post(STREAM)[:-5])
        server.signal(signal.SIGTERM)
        started = time.monotonic()
        assert server.wait_exit() == 0
        assert time.monotonic() - started < EXIT_S + BUSY_S


def test_a_dead_engine_ends_the_process_with_1(start_process):
    server = start_process(sys.executable, "-c", DYING_ENGINE, traceback=True)
    server.wait_listening()
    server.wait_ready()
    with connect(server.address) as client:
        client.sendall(post(STREAM))
        assert_cut(read_to_end(client), "engine_down")
    assert server.wait_exit() == 1
    assert "stopped by a failure: scripted death of the engine" in server.log()


def test_a_port_in_use_is_one_sentence_and_2(start_process):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = start_process(*SERVE, "--port", port, "--engine", "scripted")
        assert server.wait_exit() == 2
    (line,) = server.log().splitlines()
    assert line == (
        f"Error: Cannot listen on port {port} of 127.0.0.1: it is in use. "
        "Stop its owner or choose another."
    )


def test_a_connection_survives_bad_input_and_closes_when_asked(start_scripted):
    server = start_scripted("--scripted-text", "ab", "--max-body-size", "1MiB")
    good = {**STREAM, "stream": False}
    bad = [
        (post({}), b" 400 "),
        (post({**good, "model": "gpt-4"}), b" 404 "),
        (b"GET /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n", b" 405 "),
        (post({**good, "prompt": "x" * 2**21}), b" 413 "),
        (post(good).replace(b"application/json", b"text/plain"), b" 415 "),
    ]
    with connect(server.address) as client:
        for request, status in bad * 2:
            client.sendall(request)
            assert status in read_to(client, b"}}")
            client.sendall(post(good))
            assert b'"text":"ab"' in read_to(client, b"}}}")
        # Kept alive until now; the answer to the last request ends the connection.
        client.sendall(post(good).replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        assert b'"text":"ab"' in read_to_end(client)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_an_idle_connection_is_closed_in_time_after_an_answer(start_scripted, stream):
    server = start_scripted("--scripted-text", "ab", "--keep-alive-timeout", "2")
    with connect(server.address) as client:
        client.sendall(post({**STREAM, "stream": stream}))
        assert b'"text":"a' in read_to_end(client)


@pytest.mark.torch
def test_a_model_that_cannot_be_loaded_is_one_sentence_and_3(start_process, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    server = start_process(*SERVE, str(empty))
    assert server.wait_exit(LOAD_PATIENCE_S) == 3
    errors = [line for line in server.log().splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert server.log().splitlines()[-1] == errors[0]


@pytest.mark.model
def test_the_port_answers_before_the_model_is_loaded(model_server):
    assert model_server.early_health.status == 200
    assert model_server.early_health.json()["phase"] == "starting"
    for answer in (model_server.early_ready, model_server.early_chat):
        assert (answer.status, answer.json()["error"]["code"]) == (503, "not_ready")
        assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.model
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_while_it_loads_ends_it_at_once_and_well(start_process, number):
    server = start_process(*SERVE)
    server.wait_listening()
    server.signal(number)
    started = time.monotonic()
    assert server.wait_exit() == 0
    assert time.monotonic() - started < EXIT_S + BUSY_S
