from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.errors import DrainingError, InvalidRequestError, RequestTimeoutError
from triolet.wire.chat import ChatRequest
from triolet.wire.codec import decode_request
from triolet.wire.common import (
    MAX_LABEL_CHARACTERS,
    MAX_METADATA_KEY_CHARACTERS,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE_CHARACTERS,
    MAX_NAME_CHARACTERS,
    StreamOptions,
    error_body,
)
from triolet.wire.completions import CompletionRequest
from triolet.wire.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOKEN_ID,
)


def decode(**fields):
    return decode_request(orjson.dumps({"model": "m", "prompt": "x", **fields}), CompletionRequest)


def refused(**fields):
    with pytest.raises(InvalidRequestError) as caught:
        decode(**fields)
    return caught.value.param


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [0, 0.7, 1, 2, 2.0]),
        ("top_p", [0.001, 1, 1.0]),
        ("top_k", [-1, 0, 1, 10**9]),
        ("max_tokens", [1, 2**62]),
        ("seed", [0, -1, 2**64 - 1, -(2**63)]),
        (
            "stop",
            ["x", [], ["x"], ["x" * MAX_STOP_CHARACTERS] * 4, ["x" * 128] * MAX_STOPS, "\n\n"],
        ),
        ("stop_token_ids", [[], [0, MAX_TOKEN_ID], [1] * MAX_STOP_TOKEN_IDS]),
        ("n", [1, 10**9]),
        ("best_of", [1]),
        ("min_tokens", [0, 2**62]),
        ("min_p", [0, 0.1, 1]),
        ("repetition_penalty", [0.01, 1, 100]),
        ("presence_penalty", [-2, 0, 2.0]),
        ("frequency_penalty", [-2, 0, 2.0]),
        ("logit_bias", [{}, {"0": -100, "7": 100.0, str(MAX_TOKEN_ID): 0}]),
        ("logit_bias", [{str(number): 1 for number in range(MAX_BIASES)}]),
        ("allowed_token_ids", [[0], [MAX_TOKEN_ID, 7, 7]]),
        ("bad_words", [[], ["x", " x"], ["x" * MAX_BAD_WORD_CHARACTERS] * MAX_BAD_WORDS]),
        ("prompt_logprobs", [0, 20]),
        ("return_token_ids", [True]),
        ("return_tokens_as_token_ids", [True]),
        ("timeout", [0.001, 5, 1e9]),
        ("model", ["m" * MAX_NAME_CHARACTERS]),
        ("user", ["", "u" * MAX_LABEL_CHARACTERS]),
        ("ignore_eos", [True]),
        ("include_stop_str_in_output", [True]),
        ("skip_special_tokens", [False]),
    ],
)
def test_values_at_the_bounds_are_taken(field, values):
    for value in values:
        decode(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", -0.001, "temperature"),
        ("temperature", 2.001, "temperature"),
        ("temperature", -(2**63), "temperature"),
        ("top_p", 0, "top_p"),
        ("top_p", -0.1, "top_p"),
        ("top_p", 1.001, "top_p"),
        ("top_k", -2, "top_k"),
        ("top_k", 1.5, "top_k"),
        ("top_k", True, "top_k"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", -1, "max_tokens"),
        ("max_tokens", 1e30, "max_tokens"),
        ("seed", 1.5, "seed"),
        ("seed", True, "seed"),
        ("seed", "1", "seed"),
        ("stop", "", "stop"),
        ("stop", ["x", ""], "stop[1]"),
        ("stop", 5, "stop"),
        ("stop", {"a": "b"}, "stop"),
        ("stop", ["x", 5], "stop[1]"),
        ("stop", [["x"]], "stop[0]"),
        ("stop", "x" * (MAX_STOP_CHARACTERS + 1), "stop"),
        ("stop", ["x" * 1_000_000], "stop[0]"),
        ("stop", ["x"] * (MAX_STOPS + 1), "stop"),
        ("stop", ["x" * MAX_STOP_CHARACTERS] * 5, "stop"),
        ("stop", ["x"] * 10_000, "stop"),
        ("stop_token_ids", [1, -1], "stop_token_ids[1]"),
        ("stop_token_ids", [MAX_TOKEN_ID + 1], "stop_token_ids[0]"),
        ("stop_token_ids", [1] * (MAX_STOP_TOKEN_IDS + 1), "stop_token_ids"),
        ("n", 0, "n"),
        ("n", 1.0, "n"),
        ("n", True, "n"),
        ("n", "2", "n"),
        ("best_of", 2, "best_of"),
        ("min_tokens", -1, "min_tokens"),
        ("min_p", -0.1, "min_p"),
        ("min_p", 1.1, "min_p"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("repetition_penalty", 1e-38, "repetition_penalty"),
        ("repetition_penalty", -1, "repetition_penalty"),
        ("repetition_penalty", 1e300, "repetition_penalty"),
        ("presence_penalty", 2.1, "presence_penalty"),
        ("presence_penalty", "NaN", "presence_penalty"),
        ("frequency_penalty", -2.1, "frequency_penalty"),
        ("logit_bias", [1], "logit_bias"),
        ("logit_bias", {"cat": 1}, "logit_bias"),
        ("logit_bias", {"-1": 1}, "logit_bias"),
        ("logit_bias", {"01": 1}, "logit_bias"),
        ("logit_bias", {"1.0": 1}, "logit_bias"),
        ("logit_bias", {"\u0661": 1}, "logit_bias"),
        ("logit_bias", {str(MAX_TOKEN_ID + 1): 1}, "logit_bias"),
        ("logit_bias", {"9" * 5000: 1}, "logit_bias"),
        ("logit_bias", {"1": 1, "2": 100.1}, "logit_bias.2"),
        ("logit_bias", {"2": -101}, "logit_bias.2"),
        ("logit_bias", {"2": "NaN"}, "logit_bias.2"),
        ("logit_bias", {"2": True}, "logit_bias.2"),
        ("logit_bias", {"2": None}, "logit_bias.2"),
        ("logit_bias", {str(number): 1 for number in range(MAX_BIASES + 1)}, "logit_bias"),
        ("allowed_token_ids", [], "allowed_token_ids"),
        ("allowed_token_ids", [-1], "allowed_token_ids[0]"),
        ("allowed_token_ids", ["1"], "allowed_token_ids[0]"),
        ("allowed_token_ids", {"1": 1}, "allowed_token_ids"),
        ("bad_words", "x", "bad_words"),
        ("bad_words", ["x", ""], "bad_words[1]"),
        ("bad_words", [7], "bad_words[0]"),
        ("bad_words", ["x" * (MAX_BAD_WORD_CHARACTERS + 1)], "bad_words[0]"),
        ("bad_words", ["x"] * (MAX_BAD_WORDS + 1), "bad_words"),
        ("prompt_logprobs", -1, "prompt_logprobs"),
        ("prompt_logprobs", True, "prompt_logprobs"),
        ("return_token_ids", 1, "return_token_ids"),
        ("typical_p", 0.9, "typical_p"),
        ("timeout", 0, "timeout"),
        ("timeout", -1, "timeout"),
        ("model", "", "model"),
        ("model", "m" * (MAX_NAME_CHARACTERS + 1), "model"),
        ("user", "u" * (MAX_LABEL_CHARACTERS + 1), "user"),
    ],
)
def test_values_beyond_the_bounds_are_refused(field, value, param):
    assert refused(**{field: value}) == param


@pytest.mark.parametrize("literal", [b"18446744073709551616", b"-9223372036854775809"])
def test_a_seed_beyond_64_bits_is_refused(literal):
    with pytest.raises(InvalidRequestError, match="64 bits") as caught:
        decode_request(b'{"model":"m","prompt":"x","seed":%b}' % literal, CompletionRequest)
    assert caught.value.param == "seed"


@given(st.integers(-(2**63), 2**64 - 1))
def test_a_seed_becomes_unsigned_and_stays_itself_modulo_64_bits(seed):
    read = decode(seed=seed).seed
    assert 0 <= read < 2**64
    assert (read - seed) % 2**64 == 0


def test_top_k_has_one_way_to_be_off():
    assert decode(top_k=-1).top_k == 0
    assert decode(top_k=0).top_k == 0
    assert decode(top_k=40).top_k == 40


def test_biases_are_pairs_of_an_id_and_a_number():
    assert decode(logit_bias={"7": 1, "50256": -100.0}).logit_bias == ((7, 1.0), (50256, -100.0))


def test_allowed_ids_are_a_set():
    assert decode(allowed_token_ids=[3, 1, 3]).allowed_token_ids == {1, 3}


@pytest.mark.slow
def test_the_number_of_allowed_ids_is_bounded():
    assert refused(allowed_token_ids=[7] * (MAX_ALLOWED_TOKEN_IDS + 1)) == "allowed_token_ids"


def test_best_of_is_taken_where_it_chooses_nothing():
    assert decode(n=3, best_of=3).n == 3
    assert refused(n=3, best_of=1) == "best_of"


def test_one_stop_string_is_a_list_of_one():
    assert decode(stop="x").stop == ("x",)
    assert decode(stop=["x", "y"]).stop == ("x", "y")
    assert decode(stop=None).stop == ()


@pytest.mark.parametrize(
    "metadata",
    [
        {"a": 1},
        {"a": None},
        [],
        "x",
        {"k" * (MAX_METADATA_KEY_CHARACTERS + 1): ""},
        {"k": "v" * (MAX_METADATA_VALUE_CHARACTERS + 1)},
        {str(number): "" for number in range(MAX_METADATA_PAIRS + 1)},
    ],
)
def test_metadata_is_a_small_map_of_strings(metadata):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "metadata": metadata}
    with pytest.raises(InvalidRequestError) as caught:
        decode_request(orjson.dumps(body), ChatRequest)
    assert caught.value.param == "metadata"


def test_stream_options_are_read():
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    assert decode(stream=True, stream_options=options).stream_options == StreamOptions(
        include_usage=True, continuous_usage_stats=True
    )


@pytest.mark.parametrize("stream", [False, None])
def test_stream_options_without_stream_are_refused(stream):
    assert refused(stream=stream, stream_options={"include_usage": True}) == "stream_options"


def test_resuming_is_refused_as_long_as_it_is_not_supported():
    for value in (30, True, False):
        param = refused(stream=True, stream_options={"resume": value})
        assert param == "stream_options.resume"


def test_an_error_is_written_in_the_four_fields_of_openai():
    assert error_body(InvalidRequestError("`n` is wrong.", param="n")) == {
        "error": {
            "message": "`n` is wrong.",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_request",
        }
    }
    assert error_body(DrainingError("Later."))["error"]["code"] == "draining"
    assert error_body(RequestTimeoutError("Too late."))["error"]["code"] == "timeout"


@pytest.mark.parametrize("top_k", [2**31, 2**63, 2**64 - 1])
def test_a_top_k_beyond_every_vocabulary_fits_an_engines_integers(top_k):
    request = decode_request(
        orjson.dumps({"model": "m", "prompt": "x", "top_k": top_k}), CompletionRequest
    )
    assert request.top_k == 2**31 - 1
