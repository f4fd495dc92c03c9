"""API keys: what needs one, and what counts as one."""

from __future__ import annotations

import pytest
import trio
from tests.server.reading import CHAT, error

from triolet.config import Config
from triolet.server.auth import AuthMiddleware
from triolet.testing.asgi import open_server

KEYS = ("first-key", "second-key")
PROTECTED = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/scripted"),
    ("GET", "/v1/nothing"),
    ("DELETE", "/v1/completions"),
]
OPEN = ["/health", "/ready", "/metrics", "/version"]


async def ask(server, method, path, authorization=None):
    headers = {} if authorization is None else {"authorization": authorization}
    body = {**CHAT, "prompt": "hi"} if method == "POST" else None
    return await server.client.request(method, path, json_body=body, headers=headers)


@pytest.mark.parametrize(("method", "path"), PROTECTED)
async def test_all_of_v1_needs_a_key(autojump_clock, method, path):
    async with open_server(config=Config(api_key=KEYS)) as server:
        without = await ask(server, method, path)
        wrong = await ask(server, method, path, "Bearer other-key")
        with_key = [await ask(server, method, path, f"Bearer {key}") for key in KEYS]
    for response in (without, wrong):
        assert response.status == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
        assert error(response) == {
            "message": "Send one of the server's API keys as a bearer token.",
            "type": "authentication_error",
            "param": None,
            "code": "invalid_api_key",
        }
    assert 401 not in [response.status for response in with_key]


@pytest.mark.parametrize("path", OPEN)
async def test_probes_need_no_key(autojump_clock, path):
    async with open_server(config=Config(api_key=KEYS)) as server:
        assert (await ask(server, "GET", path)).status == 200


async def test_without_keys_all_is_open(autojump_clock):
    async with open_server() as server:
        assert (await ask(server, "GET", "/v1/models")).status == 200
        assert (await ask(server, "GET", "/v1/models", "Bearer whatever")).status == 200


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("bearer first-key", 200),
        ("BEARER  first-key ", 200),
        ("first-key", 401),
        ("Basic first-key", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("Bearer first-ke", 401),
        ("Bearer first-key-and-more", 401),
        ("Bearer first-key,second-key", 401),
        ("Bearer FIRST-KEY", 401),
        ("", 401),
    ],
)
async def test_what_counts_as_a_key(autojump_clock, authorization, status):
    async with open_server(config=Config(api_key=KEYS)) as server:
        assert (await ask(server, "GET", "/v1/models", authorization)).status == status


async def test_a_refused_request_costs_no_step(autojump_clock):
    async with open_server(config=Config(api_key=KEYS)) as server:
        await ask(server, "POST", "/v1/chat/completions", "Bearer other-key")
        assert server.runtime.backend().statistics().steps == 0
        assert server.runtime.live_requests == 0


async def test_keys_of_a_file_count_too(autojump_clock, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfiled-key\n")
    async with open_server(config=Config(api_key=("first-key",), api_key_file=str(keys))) as server:
        for key in ("first-key", "filed-key"):
            assert (await ask(server, "GET", "/v1/models", f"Bearer {key}")).status == 200
        assert (await ask(server, "GET", "/v1/models", "Bearer # ours")).status == 401


@pytest.mark.parametrize("path", ["/llm/v1/models", "/v1/models"])
async def test_a_prefix_is_no_way_around_the_key(autojump_clock, path):
    async with open_server(config=Config(api_key=KEYS, root_path="/llm")) as server:
        assert (await ask(server, "GET", path)).status == 401
        assert (await ask(server, "GET", path, "Bearer first-key")).status == 200
        assert (await ask(server, "GET", "/llm/health")).status == 200


async def test_a_prefix_that_is_a_part_of_the_path_is_no_way_around_the_key(autojump_clock):
    # The router leaves this path as it is, since the prefix ends inside of a word.
    async with open_server(config=Config(api_key=KEYS, root_path="/v")) as server:
        assert (await ask(server, "GET", "/v1/models")).status == 401


@pytest.mark.parametrize("token", [b"first-k\xe9y", b"\xff\xfe", "schlüssel".encode(), b"\x00"])
async def test_a_key_of_any_bytes_is_refused_in_peace(token):
    async def app(scope, receive, send):
        await trio.lowlevel.checkpoint()
        raise AssertionError("let through")

    sent = []

    async def send(message):
        await trio.lowlevel.checkpoint()
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/models",
        "headers": [(b"authorization", b"Bearer " + token)],
    }
    await AuthMiddleware(app, KEYS, lambda: None)(scope, None, send)
    assert sent[0]["status"] == 401


async def test_a_refused_key_is_counted_as_rejected(autojump_clock):
    async with open_server(config=Config(api_key=KEYS)) as server:
        await server.client.request("POST", "/v1/chat/completions", json_body=CHAT)
        metrics = (await server.client.request("GET", "/metrics")).body.decode()
    assert 'triolet_requests_total{outcome="rejected"} 1.0' in metrics
