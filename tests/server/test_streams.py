"""Contract §2, §4, §6, §8: what a stream says, in which order, and how it ends."""

from __future__ import annotations

import pytest
import trio
from tests.server.reading import CHAT, STREAM, chunks, error, events, text

from triolet.config import Config
from triolet.testing.asgi import open_server
from triolet.testing.engine import Script, ScriptedBackend, say, serve_script


def served(says: str = "Hello, world", *, times: int = 1, **options):
    return serve_script(ScriptedBackend(say(says, times=times), **options))


async def post(server, body, path="/v1/chat/completions", **headers):
    return await server.client.request("POST", path, json_body=body, headers=headers)


async def test_a_stream_is_text_then_finish_then_done(autojump_clock):
    async with open_server(served("Hé 👋", step_s=0.1)) as server:
        response = await post(server, STREAM)
    *deltas, last = chunks(response)
    assert [chunk["choices"][0]["delta"] for chunk in deltas] == [
        {"role": "assistant", "content": "H"},
        {"content": "é"},
        {"content": " "},
        {"content": "👋"},
    ]
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert {chunk["id"] for chunk in [*deltas, last]} == {response.headers["x-request-id"]}
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in deltas)


async def test_the_headers_keep_proxies_from_holding_tokens_back(autojump_clock):
    async with open_server(served()) as server:
        response = await post(server, STREAM)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache, no-transform"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"].startswith("chatcmpl-")
    assert "content-length" not in response.headers
    assert "content-encoding" not in response.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_streaming_or_not_says_the_same(autojump_clock, path):
    body = {**CHAT, "prompt": "hi", "stop": ["wor"], "max_tokens": 50}
    async with open_server(served("Hello 👋 \u2028 world")) as server:
        streamed = chunks(await post(server, {**body, "stream": True}, path))
        whole = (await post(server, body, path)).json()
        counted = await post(
            server, {**body, "stream": True, "stream_options": {"include_usage": True}}, path
        )
    choice = whole["choices"][0]
    pieces = [chunk["choices"][0] for chunk in streamed]
    said = "".join(
        piece.get("text") or piece.get("delta", {}).get("content", "") for piece in pieces
    )
    assert said == choice.get("text", choice.get("message", {}).get("content"))
    assert said == "Hello 👋 \u2028 "
    assert pieces[-1]["finish_reason"] == choice["finish_reason"] == "stop"
    assert pieces[-1]["stop_reason"] == choice["stop_reason"] == "wor"
    assert chunks(counted)[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == len("Hello 👋 \u2028 wor".encode())


async def test_line_ends_that_some_clients_cut_at_are_escaped(autojump_clock):
    async with open_server(served("a\u2028b\u2029c\u0085d")) as server:
        response = await post(server, STREAM)
    assert not any(mark.encode() in response.body for mark in "\u2028\u2029\u0085")
    assert text(chunks(response)) == "a\u2028b\u2029c\u0085d"


async def test_usage_is_null_until_a_last_chunk_without_choices(autojump_clock):
    async with open_server(served("ab")) as server:
        response = await post(server, {**STREAM, "stream_options": {"include_usage": True}})
    *others, last = chunks(response)
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_continuous_usage_counts_along(autojump_clock):
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with open_server(served("abc", step_s=0.1)) as server:
        response = await post(server, {**STREAM, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks(response)]
    assert counts == [1, 2, 3, 4, 4]


async def test_max_tokens_ends_with_length(autojump_clock):
    async with open_server(served("abcdef")) as server:
        whole = (await post(server, {**CHAT, "max_tokens": 3})).json()
    assert whole["choices"][0]["message"]["content"] == "abc"
    assert whole["choices"][0]["finish_reason"] == "length"


async def test_a_completion_without_max_tokens_gets_openais_sixteen(autojump_clock):
    async with open_server(served("x" * 100)) as server:
        body = {"model": "scripted", "prompt": "hi"}
        whole = (await post(server, body, "/v1/completions")).json()
    assert whole["choices"][0]["text"] == "x" * 16


async def test_text_that_was_held_back_for_a_stop_comes_before_the_finish(autojump_clock):
    async with open_server(served("good mor")) as server:
        found = chunks(await post(server, {**STREAM, "stop": ["morning"]}))
    assert text(found) == "good mor"
    assert found[-1]["choices"][0]["stop_reason"] is None


async def test_a_stop_string_that_is_a_special_token_stops(autojump_clock):
    script = Script(token_ids=(*b"ab", 261, *b"cd"), then_id=257)
    async with open_server(serve_script(ScriptedBackend(lambda _: script))) as server:
        whole = (await post(server, {**CHAT, "stop": "<|end|>"})).json()
    assert whole["choices"][0]["message"]["content"] == "ab"
    assert whole["choices"][0]["stop_reason"] == 261


async def test_headers_wait_for_the_first_token_at_most_commit_after(autojump_clock):
    async with open_server(served("ab", step_s=42.0), Config(commit_after=10)) as server:
        exchange = server.client.start("POST", "/v1/chat/completions", json_body=STREAM)
        start = trio.current_time()
        assert (await exchange.next_message())["type"] == "http.response.start"
        assert trio.current_time() - start == pytest.approx(10)
        seen = []
        while (piece := await exchange.next_body()).startswith(b": "):
            seen.append((piece, trio.current_time() - start))
        # Silence counts from the headers; the token comes after 42 s.
        assert seen == [(b": keep-alive\n", pytest.approx(at)) for at in (25, 40)]
        assert b'"content":"a"' in piece
        assert await exchange.next_body() == b": keep-alive\n"
        assert trio.current_time() - start == pytest.approx(57)
        exchange.disconnect()


async def test_a_keepalive_of_zero_is_never_sent(autojump_clock):
    async with open_server(served("ab", step_s=50.0), Config(keepalive=0)) as server:
        response = await post(server, STREAM)
    assert b": keep-alive" not in response.body
    assert text(chunks(response)) == "ab"


async def test_a_request_may_set_its_own_keepalive(autojump_clock):
    async with open_server(served("ab", step_s=25.0)) as server:
        often = await post(server, {**STREAM, "stream_options": {"keepalive": 2}})
        never = await post(server, {**STREAM, "stream_options": {"keepalive": 0}})
    assert often.body.count(b": keep-alive\n") == 31
    assert never.body.count(b": keep-alive\n") == 0
    assert chunks(often)[-1]["choices"] == chunks(never)[-1]["choices"]


async def test_a_failure_before_the_first_token_has_a_status(autojump_clock):
    script = Script(token_ids=(), then_id=257, fail_at=0)
    async with open_server(serve_script(ScriptedBackend(lambda _: script))) as server:
        streamed = await post(server, STREAM)
        whole = await post(server, CHAT)
    for response in (streamed, whole):
        assert response.status == 500
        assert error(response)["code"] == "engine_error"
        assert response.complete


async def test_a_failure_after_it_is_an_error_event_and_never_done(autojump_clock):
    script = Script(token_ids=tuple(b"abcdef"), then_id=257, fail_at=3)
    backend = ScriptedBackend(lambda _: script, step_s=0.1)
    async with open_server(serve_script(backend)) as server:
        response = await post(server, STREAM)
        after = chunks(await post(server, {**STREAM, "max_tokens": 2}))
    assert response.status == 200
    *deltas, last = events(response.body)
    assert text(deltas) == "abc"
    assert last["error"]["code"] == "engine_error"
    assert last["error"]["type"] == "server_error"
    assert not response.complete
    assert text(after) == "ab"


async def test_pending_text_goes_out_before_the_error(autojump_clock):
    script = Script(token_ids=(*b"ab mor", 0xF0), then_id=257, fail_at=7)
    async with open_server(serve_script(ScriptedBackend(lambda _: script))) as server:
        response = await post(server, {**STREAM, "stop": ["morning"]})
    *deltas, last = events(response.body)
    assert text(deltas) == "ab mor\ufffd"
    assert "error" in last


async def test_one_requests_bad_token_leaves_its_neighbours_byte_identical(autojump_clock):
    def scripts(request):
        if b"bad" in bytes(id_ for id_ in request.prompt_ids if id_ < 256):
            return Script(token_ids=(*b"x", 9999), then_id=257)
        return say("Hello, world")(request)

    def ask(server, content):
        messages = [{"role": "user", "content": content}]
        body = {**STREAM, "messages": messages}
        return server.client.start("POST", "/v1/chat/completions", json_body=body)

    texts = []
    for others in ([], ["bad"]):
        backend = ScriptedBackend(scripts, step_s=0.1)
        async with open_server(serve_script(backend)) as server:
            good, bad = ask(server, "good"), [ask(server, other) for other in others]
            async with trio.open_nursery() as nursery:
                failed = []

                async def read(exchange, into=failed):
                    into.append(await exchange.read())

                for exchange in bad:
                    nursery.start_soon(read, exchange)
                texts.append([chunk["choices"] for chunk in chunks(await good.read())])
        assert [error(response)["code"] for response in failed] == ["output_error"] * len(others)
    assert texts[0] == texts[1]
