from __future__ import annotations

import orjson
import pytest

from triolet.core import FinishReason
from triolet.errors import InvalidRequestError
from triolet.wire.chat import (
    MAX_MESSAGES,
    MAX_PARTICIPANT_CHARACTERS,
    MAX_PARTS,
    ChatChunks,
    ChatRequest,
    chat_choice,
    chat_completion,
)
from triolet.wire.codec import decode_request, encode
from triolet.wire.common import usage_body

HELLO = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def decode(**fields):
    return decode_request(orjson.dumps({**HELLO, **fields}), ChatRequest)


def refused(**fields):
    with pytest.raises(InvalidRequestError) as caught:
        decode(**fields)
    return caught.value.param


def message(**fields):
    return [{"role": "user", "content": "hi", **fields}]


def test_messages_are_available_as_a_template_expects_them():
    request = decode(
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": "hi", "name": "ann"},
            {"role": "assistant", "content": ""},
        ]
    )
    assert request.template_messages() == [
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": ""},
    ]


def test_text_parts_are_joined_by_a_line_end():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert decode(messages=message(content=parts)).messages[0].content == "one\ntwo"


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, ".type"),
        ({"type": "input_audio", "input_audio": {}}, ".type"),
        ({"type": "file", "file": {}}, ".type"),
        ({"type": "refusal", "refusal": "no"}, ".type"),
        ({"type": 3}, ".type"),
        ({"text": "x"}, ".type"),
        ({"type": "text"}, ".text"),
        ({"type": "text", "text": 3}, ".text"),
        ("text", ""),
    ],
)
def test_a_part_that_is_no_text_is_named(part, place):
    content = [{"type": "text", "text": "look:"}, part]
    assert refused(messages=message(content=content)) == f"messages[0].content[1]{place}"


@pytest.mark.parametrize("role", ["robot", "tool", "function", "User", "", 3, ["user"]])
def test_a_role_that_is_not_supported_is_named(role):
    assert refused(messages=[*message(), *message(role=role)]) == "messages[1].role"


def test_a_tool_message_is_told_that_it_comes_later():
    with pytest.raises(InvalidRequestError, match="tool messages are not supported yet"):
        decode(messages=message(role="tool"))


def test_an_empty_list_is_told_apart_from_a_long_one():
    with pytest.raises(InvalidRequestError, match="`messages` must not be empty"):
        decode(messages=[])


@pytest.mark.parametrize("messages", [[], None, "hi", {}])
def test_messages_must_be_a_list_with_something_in_it(messages):
    assert refused(messages=messages) == "messages"


@pytest.mark.parametrize("content", [None, 3, {}, [], [{"type": "text", "text": "x"}] * 1025])
def test_content_must_be_text(content):
    assert len([{}] * 1025) > MAX_PARTS
    assert refused(messages=message(content=content)) == "messages[0].content"


def test_the_number_of_messages_is_bounded():
    assert len(decode(messages=message() * MAX_MESSAGES).messages) == MAX_MESSAGES
    assert refused(messages=message() * (MAX_MESSAGES + 1)) == "messages"


def test_the_length_of_a_name_is_bounded():
    longest = "n" * MAX_PARTICIPANT_CHARACTERS
    assert decode(messages=message(name=longest)).messages[0].name == longest
    assert refused(messages=message(name=longest + "n")) == "messages[0].name"


def test_an_answer_of_the_sdk_can_be_sent_back():
    answer = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert decode(messages=[answer]).messages[0].content == "hello"


def test_a_message_with_tool_calls_is_refused_for_them_and_not_for_its_missing_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert refused(messages=[call]) == "messages[0].tool_calls"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("n", 0),
        ("best_of", 2),
        ("logprobs", True),
        ("top_logprobs", 2),
        ("prompt_logprobs", 0),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "text", "schema": {}}),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"50256": -100}),
        ("min_p", 0.1),
        ("typical_p", 0.9),
        ("min_tokens", 1),
        ("bad_words", ["x"]),
        ("allowed_token_ids", []),
        ("echo", True),
        ("audio", {}),
        ("modalities", ["audio"]),
        ("prediction", {}),
        ("reasoning_effort", "low"),
        ("web_search_options", {}),
        ("structured_outputs", {}),
        ("guided_json", {}),
        ("guided_regex", ""),
        ("return_token_ids", True),
        ("chat_template", ""),
        ("chat_template", "{{ 7 * 7 }}"),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("use_beam_search", True),
        ("length_penalty", 2),
        ("priority", 1),
        ("store", True),
        ("n", float("1e300")),
    ],
)
def test_a_field_that_would_change_the_result_is_refused(name, value):
    assert refused(**{name: value}) == name


@pytest.mark.parametrize("name", list(ChatRequest.refuses))
def test_a_refused_field_with_a_value_that_changes_nothing_is_accepted(name):
    for value in (None, *ChatRequest.refuses[name]):
        assert decode(**{name: value}) == decode()


def test_a_neutral_number_may_be_written_either_way():
    assert decode(presence_penalty=0.0, repetition_penalty=1.0, n=1.0) == decode()


def test_what_cannot_change_the_result_is_accepted():
    request = decode(
        user="u",
        metadata={"team": "a"},
        service_tier="auto",
        parallel_tool_calls=False,
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        safety_identifier="s",
        store=False,
    )
    assert request.user == "u"
    assert dict(request.metadata) == {"team": "a"}


def test_both_names_of_the_token_limit_mean_the_same():
    assert decode().token_limit is None
    assert decode(max_tokens=3).token_limit == 3
    assert decode(max_completion_tokens=3).token_limit == 3
    assert decode(max_tokens=3, max_completion_tokens=3).token_limit == 3
    assert refused(max_tokens=3, max_completion_tokens=4) == "max_completion_tokens"
    assert refused(max_completion_tokens=0) == "max_completion_tokens"


def test_a_request_does_not_show_its_messages_in_a_log_line():
    assert "secret" not in repr(decode(messages=message(content="secret")))


CHUNKS = ChatChunks("chatcmpl-1", 1764432000, "m")


def test_a_text_chunk_has_every_field_that_strict_clients_ask_for():
    assert encode(CHUNKS.text(0, "Hel", first=True)) == (
        b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1764432000,"model":"m",'
        b'"system_fingerprint":null,"choices":[{"index":0,"delta":{"role":"assistant",'
        b'"content":"Hel"},"logprobs":null,"finish_reason":null}]}'
    )
    assert CHUNKS.text(1, "lo")["choices"] == [
        {"index": 1, "delta": {"content": "lo"}, "logprobs": None, "finish_reason": None}
    ]


def test_a_finish_chunk_carries_the_last_text_and_what_stopped_it():
    chunk = CHUNKS.finish(0, FinishReason.STOP, "END", text="lo")
    assert chunk["choices"] == [
        {
            "index": 0,
            "delta": {"content": "lo"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "END",
        }
    ]
    assert CHUNKS.finish(0, FinishReason.LENGTH)["choices"][0]["delta"] == {}
    assert CHUNKS.finish(0, FinishReason.LENGTH)["choices"][0]["stop_reason"] is None


def test_a_choice_without_text_has_its_role_in_the_finish_chunk():
    chunk = CHUNKS.finish(0, FinishReason.STOP, first=True)
    assert chunk["choices"][0]["delta"] == {"role": "assistant"}


def test_usage_is_in_every_chunk_if_asked_for_and_in_none_otherwise():
    usage = usage_body(3, 2)
    asked = ChatChunks("chatcmpl-1", 1764432000, "m", include_usage=True)
    assert "usage" not in CHUNKS.text(0, "x")
    assert "usage" not in CHUNKS.finish(0, FinishReason.STOP)
    assert asked.text(0, "x")["usage"] is None
    assert asked.finish(0, FinishReason.STOP)["usage"] is None
    assert asked.text(0, "x", running=usage)["usage"] == usage
    assert CHUNKS.text(0, "x", running=usage)["usage"] == usage


def test_only_the_usage_chunk_has_no_choices():
    usage = usage_body(3, 2, cached_tokens=1)
    assert CHUNKS.usage(usage)["choices"] == []
    assert CHUNKS.usage(usage)["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_whole_response():
    choice = chat_choice(0, "Hello", FinishReason.STOP, 7)
    body = chat_completion("chatcmpl-1", 1764432000, "m", [choice], usage_body(3, 2))
    assert orjson.loads(encode(body)) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1764432000,
        "model": "m",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": 7,
            }
        ],
        "usage": usage_body(3, 2),
    }
