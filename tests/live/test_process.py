"""Contract §10: how the process starts and stops, and with which exit code."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from tests.live.processes import (
    LOAD_PATIENCE_S,
    SCRIPTED,
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

#: An engine in a thread that says "a" with each step, until a step hangs.
HANGING_ENGINE = """
import ctypes, sys, time
import attrs
import trio
from triolet.cli import models, serve
from triolet.config import Config
from triolet.core import EngineStatistics, StepResult, TokenOutput
from triolet.runtime.bridge import EngineThread
from triolet.runtime.lifecycle import Runtime
from triolet.testing.engine import serve_script

how, hang_at, step_s, stall_timeout_s, drain_timeout_s = sys.argv[1], *map(float, sys.argv[2:])

class Engine:
    def __init__(self):
        self.steps, self.live, self.new = 0, {}, []
    has_work = property(lambda self: bool(self.live))
    def add(self, request):
        self.live[request.id] = None
        self.new.append(request.id)
    def abort(self, request_id):
        self.live.pop(request_id, None)
    def end_choice(self, request_id, choice): pass
    def pause(self, request_id): pass
    resume = pause
    def statistics(self):
        return EngineStatistics(steps=self.steps, running=len(self.live))
    def step(self):
        self.steps += 1
        time.sleep(step_s)
        if self.steps == hang_at:
            # PyDLL calls keep the GIL.
            time.sleep(1e6) if how == "sleeps" else ctypes.PyDLL(None).sleep(1_000_000)
        new, self.new = self.new, []
        tokens = tuple(TokenOutput(id_, (ord("a"),), None) for id_ in self.live)
        return StepResult(self.steps, tokens, first_scheduled=tuple(new))

async def load():
    await trio.lowlevel.checkpoint()
    thread = EngineThread(Engine(), stall_timeout_s=stall_timeout_s)
    return attrs.evolve(serve_script(), backend=thread)

def create_runtime(_):
    return Runtime(
        load,
        max_live_requests=4,
        max_undelivered_bytes=65536,
        max_request_timeout_s=600,
        drain_timeout_s=drain_timeout_s,
    )

models.create_runtime = serve.create_runtime = create_runtime
if __name__ == "__main__":
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


@pytest.fixture
def start_hanging(start_process):
    """Starts a server whose engine hangs in its third step, unless told otherwise."""

    def start(*, how="sleeps", hang_at=3, step_s=0.0, stall_s=600, drain_s=600, **options):
        numbers = map(str, (hang_at, step_s, stall_s, drain_s))
        server = start_process(sys.executable, "-c", HANGING_ENGINE, how, *numbers, **options)
        server.wait_listening()
        server.wait_ready()
        return server

    return start


def test_a_stalled_engine_ends_its_streams_and_the_process_with_1(start_hanging):
    server = start_hanging(stall_s=0.5, traceback=True)
    with connect(server.address) as client, connect(server.address) as other:
        client.sendall(post(STREAM))
        read_to(client, FIRST)
        other.sendall(post(STREAM))
        started = time.monotonic()
        assert_cut(read_to_end(client), "engine_down")
        # One that the engine never saw.
        assert b"engine_down" in read_to_end(other)
    assert server.wait_exit() == 1
    assert time.monotonic() - started < 0.5 + EXIT_S + BUSY_S
    log = server.log()
    assert "stopped by a failure: One step of the engine took longer than 0.5 s" in log
    # Where it hangs, for whoever has to find out why.
    assert ", in step" in log
    assert "Fatal" not in log


def test_a_step_that_hangs_cannot_hold_the_exit(start_hanging):
    server = start_hanging(drain_s=1)
    with connect(server.address) as client:
        client.sendall(post(STREAM))
        read_to(client, FIRST)
        server.signal(signal.SIGTERM)
        started = time.monotonic()
        assert_cut(read_to_end(client), "shutdown")
    assert server.wait_exit() == 0
    assert 1 <= time.monotonic() - started < 1 + EXIT_S + BUSY_S
    assert "Fatal" not in server.log()


def test_more_signals_end_a_step_that_hangs_at_once_and_harm_no_exit(start_hanging):
    server = start_hanging()
    with connect(server.address) as client:
        client.sendall(post(STREAM))
        read_to(client, FIRST)
        server.signal(signal.SIGTERM)
        poll(lambda: server.ask("GET", "/ready").status == 503, "drain")
        started = time.monotonic()
        # All through the exit, up to its end: a second, a third, a hundredth. Not as fast as can
        # be: Python runs one handler inside of the other then, to its limit of recursion.
        while True:
            server.signal(signal.SIGINT)
            server.signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(0.001)
                break
        assert_cut(read_to_end(client), "shutdown")
    assert server.wait_exit() == 0
    assert time.monotonic() - started < EXIT_S + BUSY_S


def test_a_process_that_was_stopped_as_a_whole_goes_on(start_hanging):
    """The watchdog of the engine slept with it."""
    server = start_hanging(hang_at=0, step_s=0.5, stall_s=1)
    with connect(server.address) as client:
        client.sendall(post({**STREAM, "max_tokens": 100}))
        read_to(client, FIRST)
        server.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        poll(lambda: time.monotonic() > stopped + 2, "time to pass")
        server.signal(signal.SIGCONT)
        for _ in range(3):
            read_to(client, FIRST)
        assert server.ask("GET", "/health").status == 200
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 0


@pytest.fixture
def supervisor(tmp_path):
    """A supervisor's socket, which hears what the server says about itself."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(f"{tmp_path}/notify")
        bound.settimeout(BUSY_S)
        yield bound


def test_a_supervisor_hears_of_start_and_drain(start_process, supervisor):
    server = start_process(
        *SERVE, "--engine", "scripted", "--drain-timeout", "600", *LONG,
        NOTIFY_SOCKET=supervisor.getsockname(),
    )  # fmt: skip
    heard = b""
    while b"READY=1" not in heard:
        heard = supervisor.recv(4096)
    assert heard == b"READY=1\nSTATUS=Serving scripted"
    server.wait_listening()
    assert server.ask("GET", "/ready").status == 200
    with connect(server.address) as client:
        client.sendall(post(STREAM))
        read_to(client, FIRST)
        server.signal(signal.SIGTERM)
        assert supervisor.recv(4096) == (
            b"STOPPING=1\nEXTEND_TIMEOUT_USEC=604000000\nSTATUS=Draining, 1 requests left"
        )
        server.signal(signal.SIGTERM)
        assert_cut(read_to_end(client), "shutdown")
    assert server.wait_exit() == 0
    supervisor.settimeout(0)
    assert supervisor.recv(4096).startswith(b"STATUS=")


def test_a_step_that_keeps_the_gil_silences_the_signs_of_life(start_hanging, supervisor):
    """Nothing inside can notice it, so somebody outside has to."""
    server = start_hanging(
        how="keeps the GIL",
        stall_s=1,
        NOTIFY_SOCKET=supervisor.getsockname(),
        WATCHDOG_USEC="200000",
    )
    for _ in range(5):
        assert b"WATCHDOG=1" in supervisor.recv(4096)
    started = time.monotonic()
    with connect(server.address) as client:
        client.sendall(post(STREAM))
        read_to(client, FIRST)
        supervisor.settimeout(2)
        with suppress(TimeoutError):
            while time.monotonic() < started + BUSY_S:
                supervisor.recv(4096)
            pytest.fail("it still gives signs of life")
        server.signal(signal.SIGKILL)
        assert b"[DONE]" not in read_to_end(client)


@pytest.mark.slow
def test_under_the_plain_command_a_stalled_worker_stays_and_says_so(start_process, tmp_path):
    (tmp_path / "hanging.py").write_text(
        f"import sys\nsys.argv[1:] = ['sleeps', '3', '0', '0.5', '1']\n{HANGING_ENGINE}\n"
        "from triolet.asgi import app\n"
    )
    server = start_process(
        sys.executable, "-m", "hypercorn", "--worker-class", "trio", "--bind", "127.0.0.1:0",
        "hanging:app", PYTHONPATH=str(tmp_path), TRIOLET_ENGINE="scripted", traceback=True,
    )  # fmt: skip
    server.wait_listening()
    server.wait_ready()
    with connect(server.address) as client:
        client.sendall(post(STREAM))
        assert_cut(read_to_end(client), "engine_down")
    for _ in range(2):
        answer = server.ask("GET", "/health")
        assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_down")
    assert "this worker answers 503 until it is restarted" in server.log()
    assert server.process.poll() is None


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


EARLY_SIGNAL = """
import signal
from triolet.cli import serve
from triolet.config import Config

create_app = serve.create_app

def create_and_signal(*args):
    signal.raise_signal(signal.SIGTERM)  # nobody listens yet
    return create_app(*args)

serve.create_app = create_and_signal
serve.run(Config(engine="scripted", port=0))
"""


def test_a_signal_before_anybody_listens_is_not_lost(start_process):
    server = start_process(sys.executable, "-c", EARLY_SIGNAL)
    assert server.wait_exit() == 0


def test_nobody_has_to_read_the_greeting(start_process):
    to_nobody = (
        "import os, sys; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1); "
        "os.execv(sys.executable, sys.argv[1:])"
    )
    server = start_process(sys.executable, "-c", to_nobody, *SCRIPTED)
    server.wait_listening()
    server.wait_ready(LOAD_PATIENCE_S)
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 0
