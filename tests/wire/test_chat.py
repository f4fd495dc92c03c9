from __future__ import annotations

import orjson
import pytest

from triolet.core import FinishReason
from triolet.errors import InvalidRequestError
from triolet.wire.chat import (
    MAX_MESSAGES,
    MAX_PARTICIPANT_CHARACTERS,
    MAX_PARTS,
    MAX_TEMPLATE_KWARGS_BYTES,
    ChatRequest,
)
from triolet.wire.chat_reply import ChatBodies
from triolet.wire.codec import decode_request, encode
from triolet.wire.common import usage_body
from triolet.wire.said import Said

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
    assert [message.for_template() for message in request.messages] == [
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
        ("best_of", 2),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "text", "schema": {}}),
        ("typical_p", 0.9),
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
        ("chat_template", ""),
        ("chat_template", "{{ 7 * 7 }}"),
        ("use_beam_search", True),
        ("length_penalty", 2),
        ("store", True),
    ],
)
def test_a_field_that_would_change_the_result_is_refused(name, value):
    assert refused(**{name: value}) == name


@pytest.mark.parametrize("name", list(ChatRequest.refuses))
def test_a_refused_field_with_a_value_that_changes_nothing_is_accepted(name):
    for value in (None, *ChatRequest.refuses[name]):
        assert decode(**{name: value}) == decode()


def test_a_neutral_number_may_be_written_either_way():
    assert decode(length_penalty=1.0) == decode()


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


def test_logprobs_are_a_switch_and_a_count():
    assert decode().output_logprobs is None
    assert decode(logprobs=False, top_logprobs=0).output_logprobs is None
    assert decode(logprobs=True).output_logprobs == 0
    assert decode(logprobs=True, top_logprobs=20).output_logprobs == 20


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_logprobs_that_do_not_fit_together_are_refused(fields, param):
    assert refused(**fields) == param


def test_template_variables_are_an_object():
    kwargs = {"enable_thinking": False, "documents_": [{"a": 1}]}
    assert dict(decode(chat_template_kwargs=kwargs).chat_template_kwargs) == kwargs
    assert dict(decode().chat_template_kwargs) == {}


@pytest.mark.parametrize(
    "kwargs",
    [
        [],
        "x",
        {"": 1},
        {"two words": 1},
        {"a-b": 1},
        {"x": "y" * MAX_TEMPLATE_KWARGS_BYTES},
        {f"k{number}": 1 for number in range(MAX_TEMPLATE_KWARGS_BYTES)},
    ],
)
def test_template_variables_are_few_and_have_names(kwargs):
    assert refused(chat_template_kwargs=kwargs) == "chat_template_kwargs"


def test_both_names_of_the_token_limit_mean_the_same():
    assert decode().token_limit is None
    assert decode(max_tokens=3).token_limit == 3
    assert decode(max_completion_tokens=3).token_limit == 3
    assert decode(max_tokens=3, max_completion_tokens=3).token_limit == 3
    assert refused(max_tokens=3, max_completion_tokens=4) == "max_completion_tokens"
    assert refused(max_completion_tokens=0) == "max_completion_tokens"


def test_a_request_does_not_show_its_messages_in_a_log_line():
    assert "secret" not in repr(decode(messages=message(content="secret")))


BODIES = ChatBodies("chatcmpl-1", 1764432000, "m")


def test_a_text_chunk_has_every_field_that_strict_clients_ask_for():
    assert encode(BODIES.chunk(Said(0, "Hel", first=True))) == (
        b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1764432000,"model":"m",'
        b'"system_fingerprint":null,"choices":[{"index":0,"delta":{"role":"assistant",'
        b'"content":"Hel"},"logprobs":null,"finish_reason":null}]}'
    )
    assert BODIES.chunk(Said(1, "lo"))["choices"] == [
        {"index": 1, "delta": {"content": "lo"}, "logprobs": None, "finish_reason": None}
    ]


def test_a_finish_chunk_carries_the_last_text_and_what_stopped_it():
    chunk = BODIES.chunk(Said(0, "lo", reason=FinishReason.STOP, stop_reason="END"))
    assert chunk["choices"] == [
        {
            "index": 0,
            "delta": {"content": "lo"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "END",
        }
    ]
    (bare,) = BODIES.chunk(Said(0, reason=FinishReason.LENGTH))["choices"]
    assert bare["delta"] == {}
    assert bare["stop_reason"] is None


def test_a_choice_without_text_has_its_role_in_the_finish_chunk():
    chunk = BODIES.chunk(Said(0, reason=FinishReason.STOP, first=True))
    assert chunk["choices"][0]["delta"] == {"role": "assistant"}


def test_a_choice_is_opened_by_its_role():
    assert BODIES.opening(1)["choices"] == [
        {
            "index": 1,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ]


def test_usage_is_in_every_chunk_if_asked_for_and_in_none_otherwise():
    usage = usage_body(3, 2)
    text, finish = Said(0, "x"), Said(0, reason=FinishReason.STOP)
    asked = ChatBodies("chatcmpl-1", 1764432000, "m", include_usage=True)
    assert "usage" not in BODIES.chunk(text)
    assert "usage" not in BODIES.chunk(finish)
    assert asked.chunk(text)["usage"] is None
    assert asked.chunk(finish)["usage"] is None
    assert asked.opening(0)["usage"] is None
    assert asked.chunk(text, usage)["usage"] == usage
    assert BODIES.chunk(text, usage)["usage"] == usage


def test_only_the_usage_chunk_has_no_choices():
    usage = usage_body(3, 2, cached_tokens=1)
    assert BODIES.usage(usage)["choices"] == []
    assert BODIES.usage(usage)["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_extensions_stand_at_the_top_and_in_the_choice_but_never_in_the_delta():
    told = {"prompt_token_ids": [7], "prompt_logprobs": [None]}
    said = Said(0, "x", token_ids=(1, 2), first=True, prompt=told)
    chunk = BODIES.chunk(said)
    assert chunk["prompt_token_ids"] == [7]
    assert chunk["prompt_logprobs"] == [None]
    assert chunk["choices"][0]["token_ids"] == [1, 2]
    assert set(chunk["choices"][0]["delta"]) == {"role", "content"}
    whole = BODIES.whole([said], usage_body(1, 2))
    assert whole["prompt_token_ids"] == [7]
    assert whole["choices"][0]["token_ids"] == [1, 2]


def test_a_whole_response():
    said = Said(0, "Hello", reason=FinishReason.STOP, stop_reason=7)
    assert orjson.loads(encode(BODIES.whole([said], usage_body(3, 2)))) == {
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
