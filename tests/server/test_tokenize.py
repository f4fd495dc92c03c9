from __future__ import annotations

import pytest
import trio
from tests.server.reading import CHAT, error, held

from triolet.config import Config
from triolet.server.tokenize import MAX_READING, TIMEOUT_S
from triolet.testing.asgi import open_server
from triolet.testing.engine import ScriptedBackend, say, serve_script

MESSAGES = CHAT["messages"]
CHAT_IDS = [256, 258, *b"hi", 261, 259]


async def post(server, path, body, **headers):
    return await server.client.request("POST", path, json_body=body, headers=headers)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "hé"}, [256, *"hé".encode()]),
        ({"prompt": "hi", "add_special_tokens": False}, [*b"hi"]),
        ({"prompt": ""}, [256]),
        ({"prompt": "<|eos|>", "model": "scripted"}, [256, 257]),
        ({"messages": MESSAGES}, CHAT_IDS),
        ({"messages": MESSAGES, "add_special_tokens": True}, [256, *CHAT_IDS]),
        ({"messages": MESSAGES, "add_generation_prompt": False}, CHAT_IDS[:-1]),
        ({"messages": MESSAGES, "continue_final_message": True}, CHAT_IDS[:-2]),
        ({"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}, CHAT_IDS),
    ],
)
async def test_texts_and_chats_become_ids(autojump_clock, body, tokens):
    async with open_server() as server:
        answer = await post(server, "/tokenize", body)
        length = server.runtime.model.max_model_len
    assert answer.json() == {
        "count": len(tokens),
        "max_model_len": length,
        "tokens": tokens,
        "token_strs": None,
    }


async def test_a_chat_is_tokenized_as_it_is_generated_from(autojump_clock):
    async with open_server() as server:
        counted = (await post(server, "/tokenize", {"messages": MESSAGES})).json()
        chat = (await post(server, "/v1/chat/completions", CHAT)).json()
    assert counted["count"] == chat["usage"]["prompt_tokens"]


async def test_tokens_are_shown_if_asked_for(autojump_clock):
    async with open_server() as server:
        answer = await post(server, "/tokenize", {"prompt": "hé", "return_token_strs": True})
    assert answer.json()["token_strs"] == ["<|bos|>", "h", "<0xC3>", "<0xA9>"]


@pytest.mark.parametrize(
    ("tokens", "text"), [([256, *"hé".encode()], "<|bos|>hé"), ([], ""), ([0xC3], "\ufffd")]
)
async def test_ids_become_text(autojump_clock, tokens, text):
    async with open_server() as server:
        answer = await post(server, "/detokenize", {"tokens": tokens})
    assert answer.json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param", "status"),
    [
        ("/tokenize", {}, "prompt", 400),
        ("/tokenize", {"prompt": "x", "model": "gpt-4"}, "model", 404),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content", 400),
        (
            "/tokenize",
            {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs",
            400,
        ),
        (
            "/tokenize",
            {
                "messages": MESSAGES,
                "add_generation_prompt": True,
                "continue_final_message": True,
            },
            "continue_final_message",
            400,
        ),
        ("/detokenize", {}, "tokens", 400),
        ("/detokenize", {"tokens": [0, 262]}, "tokens[1]", 400),
        ("/detokenize", {"tokens": [1], "model": "gpt-4"}, "model", 404),
    ],
)
async def test_a_bad_request_is_refused_by_its_field(autojump_clock, path, body, param, status):
    async with open_server() as server:
        refused = await post(server, path, body)
    assert refused.status == status
    assert error(refused)["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_other_methods_and_media_types_are_refused(autojump_clock, path):
    async with open_server() as server:
        method = await server.client.request("GET", path)
        kind = await post(server, path, {}, **{"content-type": "text/plain"})
        size = await server.client.request("POST", path, body=b" " * (2**23))
    assert (method.status, kind.status, size.status) == (405, 415, 413)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_a_key_is_asked_for_as_under_v1(autojump_clock, path):
    async with open_server(config=Config(api_key=("sesame",), root_path="/llm")) as server:
        body = {"prompt": "x", "tokens": [1]}
        statuses = [
            (await post(server, prefix + path, body, **headers)).status
            for prefix in ("", "/llm")
            for headers in ({}, {"authorization": "Bearer sesame"})
        ]
    assert statuses == [401, 200, 401, 200]


async def test_a_server_that_drains_tokenizes_no_more(autojump_clock):
    async with open_server(serve_script(ScriptedBackend(say("x" * 50), step_s=0.1))) as server:
        exchange = server.client.start("POST", "/v1/chat/completions", json_body=CHAT)
        await trio.sleep(1)
        server.runtime.drain()
        refused = await post(server, "/tokenize", {"prompt": "x"})
        exchange.disconnect()
    assert (refused.status, error(refused)["code"]) == (503, "draining")


async def test_clients_that_send_no_end_are_few_at_once_and_leave_in_time(autojump_clock):
    async with open_server() as server:
        start = trio.current_time()
        slow = [
            server.client.start("POST", "/tokenize", body=b"{", more_body=True)
            for _ in range(MAX_READING)
        ]
        await trio.testing.wait_all_tasks_blocked()
        late = server.client.start("POST", "/tokenize", json_body={"prompt": "x"})
        with trio.move_on_after(1) as waiting:
            await late.next_message()
        answers = [await exchange.read() for exchange in slow]
        assert trio.current_time() - start == pytest.approx(TIMEOUT_S)
        again = await post(server, "/tokenize", {"prompt": "x"})
        assert held(server) == (0, 0, 0)
        late.disconnect()
    assert waiting.cancelled_caught
    assert {answer.status for answer in answers} == {504}
    assert again.status == 200
