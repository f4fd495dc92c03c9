"""Contract §7: several choices of one prompt, several prompts in one request."""

from __future__ import annotations

import pytest
import trio
from tests.server.reading import CHAT, STREAM, chunks, error, held

from triolet.config import Config
from triolet.testing.asgi import open_server
from triolet.testing.engine import Script, ScriptedBackend, say, say_each, serve_script

TEXT = "/v1/completions"


def served(*texts, **options):
    return serve_script(ScriptedBackend(say_each(*texts), **options))


async def post(server, body, path="/v1/chat/completions"):
    return await server.client.request("POST", path, json_body=body)


def texts(found):
    """Text by index, of chunks."""
    said = {}
    for chunk in found:
        for choice in chunk["choices"]:
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            said[choice["index"]] = said.get(choice["index"], "") + piece
    return said


def first_met(found):
    """Indices in the order in which a client meets them."""
    return list(dict.fromkeys(c["index"] for chunk in found for c in chunk["choices"]))


async def test_each_choice_has_its_text_and_its_finish(autojump_clock):
    async with open_server(served("one", "two", "three", step_s=0.1)) as server:
        whole = (await post(server, {**CHAT, "n": 3})).json()
        found = chunks(await post(server, {**STREAM, "n": 3}))
    assert [c["message"]["content"] for c in whole["choices"]] == ["one", "two", "three"]
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    assert texts(found) == {0: "one", 1: "two", 2: "three"}
    finishes = [c["index"] for chunk in found for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(finishes) == [0, 1, 2]
    assert all(len(chunk["choices"]) == 1 for chunk in found)


async def test_the_prompt_is_billed_once_and_the_output_over_all_choices(autojump_clock):
    body = {**STREAM, "n": 3, "stream_options": {"include_usage": True}}
    async with open_server(served("one", "two", "three")) as server:
        alone = (await post(server, CHAT)).json()["usage"]
        whole = (await post(server, {**CHAT, "n": 3})).json()["usage"]
        *others, last = chunks(await post(server, body))
    assert whole["prompt_tokens"] == alone["prompt_tokens"]
    assert whole["completion_tokens"] == len("onetwothree") + 3
    assert last["usage"] == whole
    assert all(chunk["usage"] is None for chunk in others)


async def test_a_role_comes_once_with_each_choice(autojump_clock):
    async with open_server(served("one", "two", step_s=0.1)) as server:
        found = chunks(await post(server, {**STREAM, "n": 2}))
    roles = [c["index"] for chunk in found for c in chunk["choices"] if "role" in c["delta"]]
    assert sorted(roles) == [0, 1]


async def test_a_choice_that_says_nothing_yet_is_opened_before_a_later_one_speaks(autojump_clock):
    # Four bytes make the one character of choice 0, while choice 1 speaks with its first.
    async with open_server(served("👋", "two", step_s=0.1)) as server:
        found = chunks(await post(server, {**STREAM, "n": 2}))
    assert first_met(found) == [0, 1]
    opening = found[0]["choices"]
    assert opening[0]["delta"] == {"role": "assistant", "content": ""}
    assert opening[0]["finish_reason"] is None
    assert texts(found) == {0: "👋", 1: "two"}
    roles = [c["index"] for chunk in found for c in chunk["choices"] if "role" in c["delta"]]
    assert roles == [0, 1]


async def test_with_logprobs_each_choice_is_opened_without_any(autojump_clock):
    async with open_server(served("one", "two", step_s=0.1)) as server:
        found = chunks(await post(server, {**STREAM, "n": 2, "logprobs": True}))
    pieces = [choice for chunk in found for choice in chunk["choices"]]
    for index in (0, 1):
        met, after, *_ = (choice for choice in pieces if choice["index"] == index)
        assert met["logprobs"] is None
        assert met["delta"] == {"role": "assistant", "content": ""}
        assert after["logprobs"] is not None
    assert sum("role" in choice["delta"] for choice in pieces) == 2


async def test_a_choice_that_ends_does_not_disturb_its_siblings(autojump_clock):
    async with open_server(served("stop here", "and go on")) as server:
        whole = (await post(server, {**CHAT, "n": 2, "stop": [" here"]})).json()
        found = chunks(await post(server, {**STREAM, "n": 2, "stop": [" here"]}))
        assert held(server) == (0, 0, 0)
    first, second = whole["choices"]
    assert (first["message"]["content"], first["stop_reason"]) == ("stop", " here")
    assert (second["message"]["content"], second["stop_reason"]) == ("and go on", None)
    assert texts(found) == {0: "stop", 1: "and go on"}


async def test_leaving_frees_all_choices(autojump_clock):
    async with open_server(served("x" * 500, "y" * 500, step_s=0.1)) as server:
        exchange = server.client.start("POST", "/v1/chat/completions", json_body={**STREAM, "n": 4})
        while b'"index":3' not in await exchange.next_body():
            pass
        exchange.disconnect()
        await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(1)
        assert held(server) == (0, 0, 0)


async def test_several_prompts_are_answered_in_their_order(autojump_clock):
    prompts = ["ab", [99, 100], "ef"]

    def repeat(request):
        ids = tuple(id_ for id_ in request.prompt_ids if id_ < 256)
        return tuple(Script(token_ids=(*ids, mark), then_id=257) for mark in b"01")

    body = {"model": "scripted", "prompt": prompts, "n": 2}
    async with open_server(serve_script(ScriptedBackend(repeat, step_s=0.1))) as server:
        whole = (await post(server, body, TEXT)).json()
        found = chunks(await post(server, {**body, "stream": True}, TEXT))
        assert held(server) == (0, 0, 0)
    expected = ["ab0", "ab1", "cd0", "cd1", "ef0", "ef1"]
    assert [c["text"] for c in whole["choices"]] == expected
    assert texts(found) == dict(enumerate(expected))
    # Each text prompt has its special token, the ids are taken as they are.
    assert whole["usage"]["prompt_tokens"] == 3 + 2 + 3
    assert whole["usage"]["completion_tokens"] == 6 * 4


async def test_one_prompt_that_fails_fails_the_request_and_frees_the_others(autojump_clock):
    def scripts(request):
        bad = ord("!") in request.prompt_ids
        return Script(token_ids=(9999,) if bad else (*b"x" * 50,), then_id=257)

    body = {"model": "scripted", "prompt": ["good", "bad!", "good"], "max_tokens": 40}
    async with open_server(serve_script(ScriptedBackend(scripts, step_s=0.1))) as server:
        failed = await post(server, body, TEXT)
        await trio.sleep(1)
        assert held(server) == (0, 0, 0)
        after = await post(server, {**body, "prompt": "good"}, TEXT)
    assert error(failed)["code"] == "output_error"
    assert after.json()["choices"][0]["text"] == "x" * 40


async def test_prompts_without_a_seed_draw_different_ones(autojump_clock):
    seen = []

    def scripts(request):
        seen.append(request.sampling.seed)
        return say("x")(request)

    body = {"model": "scripted", "prompt": ["a", "a"]}
    async with open_server(serve_script(ScriptedBackend(scripts))) as server:
        await post(server, body, TEXT)
        await post(server, {**body, "seed": 7}, TEXT)
    assert seen[0] != seen[1]
    assert seen[2:] == [7, 7]


@pytest.mark.parametrize("n", [1, 2])
async def test_the_servers_limit_of_choices_can_be_set(autojump_clock, n):
    async with open_server(served("x"), Config(max_n=1)) as server:
        response = await post(server, {**CHAT, "n": n})
    assert response.status == (200 if n == 1 else 400)
