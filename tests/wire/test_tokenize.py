from __future__ import annotations

import orjson
import pytest

from triolet.errors import InvalidRequestError
from triolet.wire.codec import decode_request
from triolet.wire.tokenize import DetokenizeRequest, TokenizeRequest

MESSAGES = [{"role": "user", "content": "hi"}]


def refused(cls, **fields):
    with pytest.raises(InvalidRequestError) as caught:
        decode_request(orjson.dumps(fields), cls)
    return caught.value.param


def test_a_text_or_a_chat_is_tokenized():
    assert decode_request(b'{"prompt": ""}', TokenizeRequest).prompt == ""
    chat = decode_request(orjson.dumps({"messages": MESSAGES}), TokenizeRequest)
    assert chat.messages[0].content == "hi"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": MESSAGES}, "messages"),
        ({"prompt": ["x"]}, "prompt"),
        ({"prompt": [1]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "x", "content": ""}]}, "messages[0].role"),
        ({"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
        ({"prompt": "x", "add_special_tokens": "no"}, "add_special_tokens"),
        ({"messages": MESSAGES, "chat_template": "{{ x }}"}, "chat_template"),
        ({"messages": MESSAGES, "tools": [{}]}, "tools"),
        ({"messages": MESSAGES, "chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"prompt": "x", "model": ""}, "model"),
    ],
)
def test_anything_else_is_refused(fields, param):
    assert refused(TokenizeRequest, **fields) == param


@pytest.mark.parametrize("tokens", [[], [0], [7, 7]])
def test_any_ids_can_be_detokenized(tokens):
    body = orjson.dumps({"tokens": tokens})
    assert decode_request(body, DetokenizeRequest).tokens == tuple(tokens)


@pytest.mark.parametrize(
    ("tokens", "param"),
    [(None, "tokens"), ("hi", "tokens"), ([-1], "tokens[0]"), ([1, "2"], "tokens[1]")],
)
def test_what_is_no_array_of_ids_is_refused(tokens, param):
    assert refused(DetokenizeRequest, tokens=tokens) == param


def test_a_text_is_not_shown_in_a_log_line():
    assert "secret" not in repr(decode_request(b'{"prompt": "secret"}', TokenizeRequest))
