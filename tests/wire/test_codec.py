from __future__ import annotations

import json
import math

import attrs
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from triolet.errors import InvalidRequestError
from triolet.wire.chat import ChatRequest
from triolet.wire.codec import decode_request, described, encode
from triolet.wire.completions import CompletionRequest

HELLO = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)
finite_json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)
known_fields = sorted(
    {field.name for cls in (ChatRequest, CompletionRequest) for field in attrs.fields(cls)}
    | set(ChatRequest.refuses)
    | set(CompletionRequest.refuses)
)


def refusal(body, cls=ChatRequest):
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    with pytest.raises(InvalidRequestError) as caught:
        decode_request(data, cls)
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": NaN}',
        b'{"model": Infinity}',
        b'{"model": -Infinity}',
        b'{"temperature": 1e999}',
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"model": "\xed\xa0\x80"}',
        b"[" * 10_000,
        b'{"messages": ' * 10_000,
        b"[" * 10_000 + b"]" * 10_000,
        b"{} {}",
        b"{'model': 1}",
        b"\xef\xbb\xbf{}",
    ],
)
def test_a_body_that_is_not_json_is_refused_as_a_whole(body):
    error = refusal(body)
    assert (error.status, error.code, error.param) == (400, "invalid_request", None)
    assert "not valid JSON" in error.message
    assert len(error.message) < 200


def test_a_body_that_is_not_utf8_says_which_byte():
    assert "byte 11 is not valid UTF-8" in refusal(b'{"model": "\xff"}').message


def test_a_refused_body_is_not_kept_alive_by_its_error():
    error = refusal(b'{"model": ')
    assert error.__cause__ is None
    assert error.__context__ is None


@pytest.mark.parametrize("body", [[], "x", 3, None, True, [HELLO]])
def test_a_body_that_is_no_object_is_refused_as_a_whole(body):
    error = refusal(body)
    assert error.param is None
    assert "must be a JSON object" in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream", "false"),
        ("stream", 0),
        ("stream", "true"),
        ("max_tokens", True),
        ("max_tokens", 1.0),
        ("max_tokens", "16"),
        ("temperature", "0.5"),
        ("temperature", True),
        ("model", 3),
        ("model", ["m"]),
        ("messages", "hello"),
        ("messages", {"0": {}}),
        ("stop_token_ids", 3),
        ("stop_token_ids", "12"),
        ("stream_options", True),
        ("ignore_eos", 1),
    ],
)
def test_nothing_is_coerced(field, value):
    error = refusal({**HELLO, field: value})
    assert error.param == field
    assert error.message.startswith(f"`{field}` must be ")


def test_an_integer_is_taken_for_a_number():
    request = decode_request(orjson.dumps({**HELLO, "temperature": 1}), ChatRequest)
    assert request.temperature == 1.0
    assert type(request.temperature) is float


@pytest.mark.parametrize("name", [f.name for f in attrs.fields(ChatRequest)])
def test_null_is_the_same_as_leaving_a_field_out(name):
    without = {key: value for key, value in HELLO.items() if key != name}
    if name in HELLO:
        assert refusal({**HELLO, name: None}).message == refusal(without).message
    else:
        null = decode_request(orjson.dumps({**HELLO, name: None}), ChatRequest)
        assert null == decode_request(orjson.dumps(without), ChatRequest)


@pytest.mark.parametrize("name", ["model", "messages"])
def test_a_missing_field_is_named(name):
    error = refusal({key: value for key, value in HELLO.items() if key != name})
    assert (error.param, error.message) == (name, f"`{name}` is required.")


def test_the_path_of_an_error_is_written_as_openai_does():
    messages = [*HELLO["messages"], {"role": "robot", "content": "hi"}]
    assert refusal({**HELLO, "messages": messages}).param == "messages[1].role"
    options = {"include_usage": "yes"}
    error = refusal({**HELLO, "stream": True, "stream_options": options})
    assert error.param == "stream_options.include_usage"


def test_the_first_error_in_field_order_wins_whatever_the_order_of_the_body():
    body = {"messages": [], "temperature": 9, "stream": 3, "model": "m"}
    for fields in (body, dict(reversed(body.items()))):
        assert refusal(fields).param == "stream"


def test_unknown_fields_are_ignored():
    body = {**HELLO, "x_made_up": {"a": [1]}, "__class__": "int", "__attrs_attrs__": 1}
    assert decode_request(orjson.dumps(body), ChatRequest) == decode_request(
        orjson.dumps(HELLO), ChatRequest
    )


@given(st.text(min_size=1, max_size=5000))
@example("\x00\n\r\x1b[31m" * 100)
@example("\U000e0001" * 5000)
@example("'" * 100)
def test_an_error_repeats_at_most_a_hundred_characters_and_stays_one_line(text):
    message = refusal({**HELLO, "stream": text}).message
    assert len(message) - len("`stream` must be true or false, not .") <= 100
    assert message.isprintable()


@pytest.mark.slow  # a hundred examples
@given(json_values)
def test_a_value_is_described_in_at_most_a_hundred_printable_characters(value):
    assert len(described(value)) <= 100
    assert described(value).isprintable()


def check_any_body(body, cls):
    error = None
    try:
        decode_request(body, cls)
    except InvalidRequestError as refused:
        error = refused
    if error is not None:
        for name in ("triolet", "attrs", "cattrs", "<class", "object at 0x"):
            assert name not in error.message
        assert error.message.endswith(".")


@pytest.mark.slow  # a hundred examples
@given(value=json_values, cls=st.sampled_from([ChatRequest, CompletionRequest]))
def test_any_json_value_is_decoded_or_refused_and_nothing_else(value, cls):
    check_any_body(orjson.dumps(value), cls)


@pytest.mark.slow  # a hundred examples
@given(
    st.dictionaries(st.sampled_from(known_fields), json_values, max_size=6),
    st.sampled_from([ChatRequest, CompletionRequest]),
)
def test_any_value_in_any_known_field_is_decoded_or_refused_and_nothing_else(fields, cls):
    check_any_body(orjson.dumps({**HELLO, "prompt": "x", **fields}), cls)


@pytest.mark.slow  # a hundred examples
@given(st.binary(max_size=200), st.sampled_from([ChatRequest, CompletionRequest]))
def test_any_bytes_are_decoded_or_refused_and_nothing_else(body, cls):
    check_any_body(body, cls)


def test_nesting_up_to_the_parser_limit_in_any_field_is_survived():
    deep = b"[" * 1000 + b"]" * 1000
    for name in known_fields:
        fields = [f'"{key}":{json.dumps(HELLO[key])}'.encode() for key in HELLO if key != name]
        body = b"{" + b",".join([*fields, b'"%b":%b' % (name.encode(), deep)]) + b"}"
        check_any_body(body, ChatRequest)
        check_any_body(body, CompletionRequest)


@pytest.mark.slow  # a hundred examples
@given(finite_json_values)
@example("a\u2028b\u2029c\u0085d\n\r")
@example({"\u2028": ["\u0085"]})
def test_what_is_encoded_is_one_line_and_reads_back_the_same(value):
    data = encode(value)
    assert orjson.loads(data) == value
    assert len(data.decode().splitlines()) == 1


def test_line_separators_are_escaped_and_other_characters_are_not():
    assert encode("é\u2028\u2029\u0085\u2027🙂") == ('"é\\u2028\\u2029\\u0085\u2027🙂"'.encode())


def test_an_escape_of_the_client_is_not_escaped_twice():
    assert encode("\\u2028\u2028") == rb'"\\u2028\u2028"'


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["top", "deep", "array"])
def test_the_wire_never_carries_a_number_that_json_has_not(number, place):
    value = {"top": number, "deep": {"a": [1, {"b": (number,)}]}, "array": [[number]]}[place]
    with pytest.raises(ValueError, match="not a JSON number"):
        encode(value)


@pytest.mark.parametrize("value", ["\ud800", 2**64, {1: 2}, object()])
def test_what_json_does_not_know_is_a_type_error(value):
    with pytest.raises(TypeError):
        encode(value)
