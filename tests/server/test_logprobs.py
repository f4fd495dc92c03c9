"""Contract §5: logprobs of both endpoints, of the prompt, and token ids."""

from __future__ import annotations

import pytest
from tests.server.reading import CHAT, STREAM, chunks

from triolet.config import Config
from triolet.testing.asgi import open_server
from triolet.testing.engine import Script, ScriptedBackend, say, score, serve_script

TEXT = "/v1/completions"
PROMPT = {"model": "scripted", "prompt": "hi"}


def served(says="Hé👋", **options):
    return serve_script(ScriptedBackend(say(says), **options))


async def post(server, body, path="/v1/chat/completions"):
    return await server.client.request("POST", path, json_body=body)


async def test_a_chat_has_an_entry_for_each_token_the_last_included(autojump_clock):
    async with open_server(served("Hé")) as server:
        whole = (await post(server, {**CHAT, "logprobs": True, "top_logprobs": 3})).json()
    entries = whole["choices"][0]["logprobs"]["content"]
    assert len(entries) == whole["usage"]["completion_tokens"] == 4
    assert [entry["token"] for entry in entries[:3]] == ["H", "bytes:\\xc3", "bytes:\\xa9"]
    assert bytes(byte for entry in entries for byte in entry["bytes"] or ()).decode() == "Hé"
    assert [entry["logprob"] for entry in entries] == [
        score(token_id, index, 0).logprob for index, token_id in enumerate((*"Hé".encode(), 257))
    ]
    for index, entry in enumerate(entries):
        expected = [probability for _, probability in score(0, index, 3).top]
        assert [top["logprob"] for top in entry["top_logprobs"]] == expected


async def test_logprobs_without_a_count_are_of_the_tokens_alone(autojump_clock):
    async with open_server(served("H")) as server:
        whole = (await post(server, {**CHAT, "logprobs": True})).json()
        none = (await post(server, CHAT)).json()
    assert whole["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert none["choices"][0]["logprobs"] is None


async def test_a_token_without_text_has_a_chunk_only_if_its_logprob_was_asked_for(autojump_clock):
    async with open_server(served("👋", step_s=0.1)) as server:
        plain = chunks(await post(server, STREAM))
        opening, *asked = chunks(await post(server, {**STREAM, "logprobs": True}))
    assert len(plain) == 2
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [len(c["choices"][0]["logprobs"]["content"]) for c in asked] == [1, 1, 1, 1, 1]
    assert [c["choices"][0]["delta"].get("content") for c in asked[:4]] == ["", "", "", "👋"]


async def test_a_completion_says_where_each_token_begins(autojump_clock):
    async with open_server(served("Hé👋!")) as server:
        whole = (await post(server, {**PROMPT, "logprobs": 1}, TEXT)).json()
    (choice,) = whole["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "Hé👋!"
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3, 4]
    assert {len(values) for values in logprobs.values()} == {9}
    # The likeliest token and the chosen one, where they differ.
    assert all(len(top) in {1, 2} for top in logprobs["top_logprobs"])
    for token, probability, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == probability


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hé", [256, 104, 0xC3, 0xA9]])
async def test_an_echo_is_the_prompt_with_its_logprobs_before_the_output(
    autojump_clock, prompt, stream
):
    body = {**PROMPT, "prompt": prompt, "echo": True, "logprobs": 2, "stream": stream}
    async with open_server(served("ab", step_s=0.1)) as server:
        response = await post(server, body, TEXT)
    found = chunks(response) if stream else [response.json()]
    text = "".join(chunk["choices"][0]["text"] for chunk in found)
    parts = [chunk["choices"][0]["logprobs"] for chunk in found if chunk["choices"][0]["logprobs"]]
    tokens, logprobs, offsets = (
        [item for part in parts for item in part[name]]
        for name in ("tokens", "token_logprobs", "text_offset")
    )
    assert text == "héab"
    assert tokens == ["<|bos|>", "h", "bytes:\\xc3", "bytes:\\xa9", "a", "b", "<|eos|>"]
    assert offsets == [0, 0, 1, 1, 2, 3, 4]
    assert logprobs[0] is None
    assert None not in logprobs[1:]
    assert found[0]["choices"][0]["logprobs"]["top_logprobs"][0] is None


async def test_an_echo_without_logprobs_is_text_alone(autojump_clock):
    async with open_server(served("ab")) as server:
        whole = (await post(server, {**PROMPT, "echo": True, "n": 2}, TEXT)).json()
    assert [choice["text"] for choice in whole["choices"]] == ["hiab", "hiab"]
    assert [choice["logprobs"] for choice in whole["choices"]] == [None, None]


async def test_a_prompt_of_one_token_is_echoed_with_one_null(autojump_clock):
    body = {**PROMPT, "prompt": [104], "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    async with open_server(served("a")) as server:
        (choice,) = (await post(server, body, TEXT)).json()["choices"]
    assert choice["text"] == "ha"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == 3
    assert choice["prompt_logprobs"] == [None]


async def test_prompt_logprobs_are_by_id_and_stand_where_vllm_has_them(autojump_clock):
    async with open_server(served("a", step_s=0.1)) as server:
        text = (await post(server, {**PROMPT, "prompt_logprobs": 2}, TEXT)).json()
        chat = (await post(server, {**CHAT, "prompt_logprobs": 2})).json()
        streamed = chunks(await post(server, {**STREAM, "prompt_logprobs": 2}))
    first, *rest = text["choices"][0]["prompt_logprobs"]
    assert first is None
    assert [next(iter(place)) for place in rest] == [str(id_) for id_ in b"hi"]
    assert all(2 <= len(place) <= 3 for place in rest)
    assert all(set(entry) == {"logprob", "rank", "decoded_token"} for entry in rest[0].values())
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert streamed[0]["prompt_logprobs"] == chat["prompt_logprobs"]
    assert all("prompt_logprobs" not in chunk for chunk in streamed[1:])


async def test_token_ids_are_told_if_asked_for(autojump_clock):
    script = Script(token_ids=(*b"a", 258, *b"b"), then_id=257)
    async with open_server(serve_script(ScriptedBackend(lambda _: script, step_s=0.1))) as server:
        whole = (await post(server, {**CHAT, "return_token_ids": True})).json()
        streamed = chunks(await post(server, {**STREAM, "return_token_ids": True}))
        text = (await post(server, {**PROMPT, "return_token_ids": True}, TEXT)).json()
        none = (await post(server, CHAT)).json()
    assert whole["choices"][0]["token_ids"] == [97, 258, 98, 257]
    assert whole["choices"][0]["message"]["content"] == "ab"
    assert [c["choices"][0]["token_ids"] for c in streamed] == [[97], [258], [98], [257]]
    assert streamed[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert text["choices"][0]["prompt_token_ids"] == [256, *b"hi"]
    assert "token_ids" not in none["choices"][0]
    assert "prompt_token_ids" not in none


async def test_tokens_are_called_by_their_ids_if_asked_for(autojump_clock):
    body = {**CHAT, "logprobs": True, "return_tokens_as_token_ids": True}
    async with open_server(served("a")) as server:
        whole = (await post(server, body)).json()
    entries = whole["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["token_id:97", "token_id:257"]
    assert entries[0]["bytes"] == [97]


async def test_the_servers_limit_of_logprobs_can_be_set(autojump_clock):
    async with open_server(served("a"), Config(max_logprobs=0)) as server:
        none = await post(server, {**PROMPT, "logprobs": 0}, TEXT)
        one = await post(server, {**PROMPT, "logprobs": 1}, TEXT)
    assert (none.status, one.status) == (200, 400)


async def test_the_logprobs_of_a_stop_end_with_the_token_that_completed_it(autojump_clock):
    body = {**CHAT, "logprobs": True, "stop": ["wor"]}
    async with open_server(served("Hi world")) as server:
        whole = (await post(server, body)).json()
    entries = whole["choices"][0]["logprobs"]["content"]
    assert whole["choices"][0]["message"]["content"] == "Hi "
    assert "".join(entry["token"] for entry in entries) == "Hi wor"
    assert whole["usage"]["completion_tokens"] == len(entries)


async def test_prompt_scores_are_bounded_as_often_as_they_are_repeated(autojump_clock):
    body = {"model": "scripted", "prompt": [65] * 1000, "prompt_logprobs": 20, "max_tokens": 1}
    async with open_server() as server:
        once, often = [
            await server.client.request("POST", "/v1/completions", json_body={**body, "n": n})
            for n in (1, 4)
        ]
    assert once.status == 200
    assert (often.status, often.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_a_whole_response_of_too_many_logprobs_has_to_be_streamed(autojump_clock):
    body = {"model": "scripted", "prompt": "x", "logprobs": 20, "n": 16, "max_tokens": 1000}
    async with open_server() as server:
        whole = await server.client.request("POST", "/v1/completions", json_body=body)
    assert (whole.status, whole.json()["error"]["param"]) == (400, "logprobs")


async def test_every_chunk_carries_the_running_usage_openings_too(autojump_clock):
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "hi"}],
        "logprobs": True,
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
    }
    async with open_server() as server:
        response = await server.client.request("POST", "/v1/chat/completions", json_body=body)
    assert all(chunk["usage"] is not None for chunk in chunks(response))
