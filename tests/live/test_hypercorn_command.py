"""The app under the plain ``hypercorn`` command, configured by the environment."""

from __future__ import annotations

import signal
import sys

import pytest
from tests.live.processes import LOAD_PATIENCE_S, connect, post, read_to, read_to_end

pytestmark = [pytest.mark.live, pytest.mark.slow]

COMMAND = (
    sys.executable, "-m", "hypercorn", "--worker-class", "trio", "--bind", "127.0.0.1:0",
    "triolet.asgi:app",
)  # fmt: skip


def test_it_streams_and_stops(start_process):
    server = start_process(
        *COMMAND,
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


def test_a_disconnect_frees_all_here_too(start_process):
    server = start_process(
        *COMMAND,
        TRIOLET_ENGINE="scripted",
        TRIOLET_SCRIPTED_TEXT="ab " * 1000,
        TRIOLET_SCRIPTED_STEP_MS="10",
    )
    server.wait_listening()
    server.wait_ready()
    with connect(server.address) as client:
        client.sendall(
            post({"model": "scripted", "prompt": "x", "stream": True, "max_tokens": 3000})
        )
        read_to(client, b'"text":"a"')
        assert server.held()
    server.wait_free()
    assert server.numbers()["cancelled:disconnect"] == 1
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 0


@pytest.mark.model
def test_it_serves_the_real_model(start_process):
    server = start_process(*COMMAND)
    server.wait_listening()
    assert server.ask("GET", "/ready").status == 503
    server.wait_ready(LOAD_PATIENCE_S)
    model = server.ask("GET", "/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 4}
    assert "Paris" in server.ask("POST", "/v1/completions", body).json()["choices"][0]["text"]
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 0
