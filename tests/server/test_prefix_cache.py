"""Whose prompts reuse whose, and what a client is told of it."""

from __future__ import annotations

import re

import pytest
from tests.server.reading import CHAT, chunks, error

from triolet.config import Config
from triolet.server.auth import AuthMiddleware
from triolet.testing.asgi import open_server
from triolet.testing.engine import ScriptedBackend, say, serve_script

KEYS = ("first-key", "second-key")
LONG = {
    **CHAT,
    "max_tokens": 3,
    "messages": [{"role": "user", "content": "Which of these words is the longest? " * 4}],
}


async def ask(server, key=None, **fields):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return await server.client.request(
        "POST", "/v1/chat/completions", json_body={**LONG, **fields}, headers=headers
    )


def counts(response) -> tuple[int, int]:
    """Prompt tokens, and how many of them needed no computing."""
    usage = response.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


async def test_a_prompt_sent_again_is_cached_but_for_its_last_token(autojump_clock):
    async with open_server() as server:
        tokens, cached = counts(await ask(server))
        again = counts(await ask(server, n=2))
    assert cached == 0
    assert again == (tokens, tokens - 1)


async def test_all_prompts_of_a_request_count(autojump_clock):
    body = {"model": "scripted", "prompt": ["a" * 40, "b" * 50], "max_tokens": 1}
    async with open_server() as server:
        for _ in range(2):
            response = await server.client.request("POST", "/v1/completions", json_body=body)
    # Each has a token that begins it.
    assert counts(response) == (41 + 51, 40 + 50)


async def test_a_stream_says_so_from_its_first_chunk_on(autojump_clock):
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with open_server() as server:
        tokens, _ = counts(await ask(server))
        found = chunks(await ask(server, stream=True, stream_options=options))
    assert {chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in found} == {
        tokens - 1
    }


async def test_a_request_without_end_knows_it_too(autojump_clock):
    """The record has it, whatever the end."""
    async with open_server() as server:
        await ask(server)
        records = []
        count = server.runtime.on_record
        server.runtime.on_record = lambda record: (records.append(record), count(record))
        await ask(server)
    [record] = records
    assert record.usage.cached_tokens == record.usage.prompt_tokens - 1


@pytest.mark.parametrize(("scope", "shared"), [("key", False), ("server", True)])
async def test_another_key_finds_it_only_where_the_server_says_so(autojump_clock, scope, shared):
    config = Config(api_key=KEYS, prefix_cache_scope=scope)
    async with open_server(config=config) as server:
        tokens, _ = counts(await ask(server, KEYS[0]))
        other = counts(await ask(server, KEYS[1]))
        own = counts(await ask(server, KEYS[0]))
    assert other == (tokens, tokens - 1 if shared else 0)
    assert own == (tokens, tokens - 1)


@pytest.mark.parametrize("scope", ["key", "server"])
async def test_a_salt_keeps_apart_and_the_same_one_joins(autojump_clock, scope):
    config = Config(api_key=KEYS, prefix_cache_scope=scope)
    async with open_server(config=config) as server:
        found = [
            counts(await ask(server, KEYS[0], cache_salt=salt))[1] > 0
            for salt in (None, "pepper", "salt", "pepper", None)
        ]
    assert found == [False, False, False, True, True]


async def test_no_salt_opens_another_keys_prefixes(autojump_clock):
    async with open_server(config=Config(api_key=KEYS)) as server:
        await ask(server, KEYS[0], cache_salt="pepper")
        await ask(server, KEYS[0])
        first = AuthMiddleware(None, keys=KEYS, on_rejected=None)._tenant(f"Bearer {KEYS[0]}")
        for salt in (first, f"{first}:", f"{first}:pepper", ":pepper", "pepper", ":"):
            assert counts(await ask(server, KEYS[1], cache_salt=salt))[1] == 0
    assert ":" not in first


@pytest.mark.parametrize("salt", ["", "x" * 513, 7, ["a"]])
async def test_a_salt_is_a_string_of_bounded_length(autojump_clock, salt):
    async with open_server() as server:
        response = await ask(server, cache_salt=salt)
    assert response.status == 400
    assert error(response)["param"] == "cache_salt"


async def test_it_can_be_turned_off(autojump_clock):
    backend = ScriptedBackend(say("no"), prefix_caching=False)
    async with open_server(serve_script(backend)) as server:
        await ask(server)
        assert counts(await ask(server))[1] == 0


async def test_metrics_tell_what_was_looked_for_and_found(autojump_clock):
    async with open_server() as server:
        for _ in range(2):
            tokens, _ = counts(await ask(server))
        body = (await server.client.request("GET", "/metrics")).body.decode()

    def metric(name):
        return float(re.search(rf"^{name} (\S+)$", body, re.MULTILINE)[1])

    assert metric("triolet_engine_prefix_cache_queried_tokens_total") == 2 * tokens
    assert metric("triolet_engine_prefix_cache_hit_tokens_total") == tokens - 1
    assert metric("triolet_engine_kv_blocks_cached") >= tokens // 16
    assert metric("triolet_engine_kv_blocks_used") == 0
