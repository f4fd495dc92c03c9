from __future__ import annotations

import orjson
import pytest

from triolet.core import FinishReason
from triolet.errors import InvalidRequestError
from triolet.wire.codec import decode_request, encode
from triolet.wire.common import MAX_TOKEN_ID, usage_body
from triolet.wire.completions import (
    MAX_PROMPT_IDS,
    CompletionChunks,
    CompletionRequest,
    completion,
    completion_choice,
)


def decode(**fields):
    return decode_request(orjson.dumps({"model": "m", "prompt": "x", **fields}), CompletionRequest)


def refused(**fields):
    with pytest.raises(InvalidRequestError) as caught:
        decode(**fields)
    return caught.value.param


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("once", "once"),
        (["once"], "once"),
        ([1, 2], (1, 2)),
        ([[1, 2]], (1, 2)),
        ([0, MAX_TOKEN_ID], (0, MAX_TOKEN_ID)),
    ],
)
def test_a_prompt_is_text_or_ids_alone_or_wrapped_in_an_array(prompt, expected):
    assert decode(prompt=prompt).prompt == expected


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([""], "prompt[0]"),
        ([[]], "prompt[0]"),
        (["one", "two"], "prompt"),
        ([[1], [2]], "prompt"),
        ([1, -1], "prompt[1]"),
        ([1, MAX_TOKEN_ID + 1], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1, 1.0], "prompt[1]"),
        ([True], "prompt[0]"),
        ([None], "prompt[0]"),
        ([{}], "prompt[0]"),
        ([[[1]]], "prompt[0][0]"),
        ([["a"]], "prompt[0][0]"),
    ],
)
def test_another_prompt_is_refused(prompt, param):
    assert refused(prompt=prompt) == param


@pytest.mark.slow
def test_the_number_of_ids_is_bounded():
    assert len(decode(prompt=[7] * MAX_PROMPT_IDS).prompt) == MAX_PROMPT_IDS
    assert refused(prompt=[7] * (MAX_PROMPT_IDS + 1)) == "prompt"


@pytest.mark.parametrize(
    ("name", "value"),
    [("suffix", "end"), ("echo", True), ("best_of", 2), ("logprobs", 0), ("logprobs", 5)],
)
def test_a_field_that_would_change_the_result_is_refused(name, value):
    assert refused(**{name: value}) == name


@pytest.mark.parametrize("name", list(CompletionRequest.refuses))
def test_a_refused_field_with_a_value_that_changes_nothing_is_accepted(name):
    for value in (None, *CompletionRequest.refuses[name]):
        assert decode(**{name: value}) == decode()


def test_the_limit_of_tokens_has_one_name_here():
    assert decode(max_tokens=4).token_limit == 4
    assert decode().token_limit is None


def test_a_request_does_not_show_its_prompt_in_a_log_line():
    assert "secret" not in repr(decode(prompt="secret"))


def test_a_stream_of_chunks():
    chunks = CompletionChunks("cmpl-1", 1764432000, "m")
    assert encode(chunks.text(0, "Hel", first=True)) == (
        b'{"id":"cmpl-1","object":"text_completion","created":1764432000,"model":"m",'
        b'"system_fingerprint":null,"choices":[{"index":0,"text":"Hel","logprobs":null,'
        b'"finish_reason":null}]}'
    )
    assert chunks.finish(0, FinishReason.LENGTH, text="lo")["choices"] == [
        {
            "index": 0,
            "text": "lo",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert chunks.usage(usage_body(3, 2))["choices"] == []
    assert "usage" not in chunks.text(0, "x")
    asked = CompletionChunks("cmpl-1", 1764432000, "m", include_usage=True)
    assert asked.text(0, "x")["usage"] is None
    assert asked.text(0, "x", running=usage_body(3, 1))["usage"] == usage_body(3, 1)


def test_a_whole_response():
    choice = completion_choice(0, "Hello", FinishReason.STOP, "END")
    assert completion("cmpl-1", 1764432000, "m", [choice], usage_body(3, 2)) == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1764432000,
        "model": "m",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "text": "Hello",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": "END",
            }
        ],
        "usage": usage_body(3, 2),
    }
