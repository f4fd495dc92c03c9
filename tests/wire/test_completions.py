from __future__ import annotations

import orjson
import pytest

from triolet.core import FinishReason
from triolet.errors import InvalidRequestError
from triolet.wire.codec import decode_request, encode
from triolet.wire.common import usage_body
from triolet.wire.completion_reply import CompletionBodies
from triolet.wire.completions import MAX_PROMPT_IDS, MAX_PROMPTS, CompletionRequest
from triolet.wire.said import Said
from triolet.wire.sampling import MAX_TOKEN_ID


def decode(**fields):
    return decode_request(orjson.dumps({"model": "m", "prompt": "x", **fields}), CompletionRequest)


def refused(**fields):
    with pytest.raises(InvalidRequestError) as caught:
        decode(**fields)
    return caught.value.param


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("once", ("once",)),
        (["once"], ("once",)),
        (["once", "upon"], ("once", "upon")),
        ([1, 2], ((1, 2),)),
        ([[1, 2]], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["once", [1, 2]], ("once", (1, 2))),
        ([0, MAX_TOKEN_ID], ((0, MAX_TOKEN_ID),)),
        (["x"] * MAX_PROMPTS, ("x",) * MAX_PROMPTS),
    ],
)
def test_prompts_are_texts_or_ids_one_or_several(prompt, expected):
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
        (["once", ""], "prompt[1]"),
        ([[]], "prompt[0]"),
        (["once", 1], "prompt[1]"),
        (["x"] * (MAX_PROMPTS + 1), "prompt"),
        ([[1]] * 100_000, "prompt"),
        ([1, -1], "prompt[1]"),
        ([1, MAX_TOKEN_ID + 1], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1, 1.0], "prompt[1]"),
        ([True], "prompt[0]"),
        ([None], "prompt[0]"),
        ([{}], "prompt[0]"),
        ([[1], [1, -1]], "prompt[1][1]"),
        ([[[1]]], "prompt[0][0]"),
        ([["a"]], "prompt[0][0]"),
    ],
)
def test_another_prompt_is_refused(prompt, param):
    assert refused(prompt=prompt) == param


@pytest.mark.slow
def test_the_number_of_ids_is_bounded():
    assert len(decode(prompt=[7] * MAX_PROMPT_IDS).prompt[0]) == MAX_PROMPT_IDS
    assert refused(prompt=[7] * (MAX_PROMPT_IDS + 1)) == "prompt"
    half = [7] * (MAX_PROMPT_IDS // 2)
    assert refused(prompt=[half, half, [7]]) == "prompt"


def test_logprobs_are_a_count_or_none():
    assert decode().output_logprobs is None
    assert decode(logprobs=None).output_logprobs is None
    assert decode(logprobs=False).output_logprobs is None
    assert decode(logprobs=0).output_logprobs == 0
    assert decode(logprobs=5).output_logprobs == 5


@pytest.mark.parametrize("value", [True, -1, 1.0, "5"])
def test_logprobs_without_a_count_are_refused(value):
    assert refused(logprobs=value) == "logprobs"


@pytest.mark.parametrize(
    ("name", "value"),
    [("suffix", "end"), ("best_of", 2), ("top_logprobs", 1), ("echo", "yes")],
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
    bodies = CompletionBodies("cmpl-1", 1764432000, "m")
    assert encode(bodies.chunk(Said(0, "Hel", first=True))) == (
        b'{"id":"cmpl-1","object":"text_completion","created":1764432000,"model":"m",'
        b'"system_fingerprint":null,"choices":[{"index":0,"text":"Hel","logprobs":null,'
        b'"finish_reason":null}]}'
    )
    assert bodies.chunk(Said(0, "lo", reason=FinishReason.LENGTH))["choices"] == [
        {
            "index": 0,
            "text": "lo",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert bodies.usage(usage_body(3, 2))["choices"] == []
    assert "usage" not in bodies.chunk(Said(0, "x"))
    asked = CompletionBodies("cmpl-1", 1764432000, "m", include_usage=True)
    assert asked.chunk(Said(0, "x"))["usage"] is None
    assert asked.chunk(Said(0, "x"), usage_body(3, 1))["usage"] == usage_body(3, 1)


def test_each_choice_tells_of_its_prompt():
    bodies = CompletionBodies("cmpl-1", 1764432000, "m")
    told = {"prompt_token_ids": [7], "prompt_logprobs": [None]}
    said = Said(3, "x", token_ids=(1, 2), first=True, prompt=told)
    for body in (bodies.chunk(said), bodies.whole([said], usage_body(1, 2))):
        (choice,) = body["choices"]
        assert choice["token_ids"] == [1, 2]
        assert choice["prompt_token_ids"] == [7]
        assert choice["prompt_logprobs"] == [None]


def test_a_whole_response():
    bodies = CompletionBodies("cmpl-1", 1764432000, "m")
    said = Said(0, "Hello", reason=FinishReason.STOP, stop_reason="END")
    assert bodies.whole([said], usage_body(3, 2)) == {
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
