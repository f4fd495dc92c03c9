from __future__ import annotations

import attrs
import pytest

from triolet.core import TokenLogprobs
from triolet.wire.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs

TOP = ((1, -0.1), (2, -2.0), (3, -2.0), (4, -5.0))


@attrs.frozen
class Word:
    token: str
    data: tuple[int, ...] | None
    logprob: float


def spell(token_id, logprob):
    """Ids are letters; 26 and above have no bytes."""
    word = chr(ord("a") + token_id)
    return Word(word, (ord(word),) if token_id < 26 else None, logprob)


def test_a_chat_lists_each_token_with_the_most_likely_ones():
    written = chat_logprobs([TokenLogprobs(4, -5.0, 4, TOP)], spell, top=2)
    assert written == {
        "content": [
            {
                "token": "e",
                "logprob": -5.0,
                "bytes": [101],
                "top_logprobs": [
                    {"token": "b", "logprob": -0.1, "bytes": [98]},
                    {"token": "c", "logprob": -2.0, "bytes": [99]},
                ],
            }
        ],
        "refusal": None,
    }


def test_a_token_that_adds_nothing_to_the_text_has_no_bytes():
    written = chat_logprobs([TokenLogprobs(30, -1.0, 1, ((30, -1.0),))], spell, top=1)
    (entry,) = written["content"]
    assert entry["bytes"] is None
    assert entry["top_logprobs"][0]["bytes"] is None


def test_no_tokens_have_no_logprobs():
    assert chat_logprobs((), spell, top=2) is None
    assert completion_logprobs((), (), spell, top=2) is None


@pytest.mark.parametrize(
    ("token_id", "top", "expected"),
    [
        (1, 2, {"b": -0.1, "c": -2.0}),
        # The chosen token takes no place of the two, but is there.
        (4, 2, {"b": -0.1, "c": -2.0, "e": -5.0}),
        (4, 0, {"e": -5.0}),
    ],
)
def test_a_completion_has_the_chosen_token_beside_the_most_likely_ones(token_id, top, expected):
    entry = TokenLogprobs(token_id, dict(TOP)[token_id], token_id, TOP)
    written = completion_logprobs([entry], [3], spell, top=top)
    assert written["top_logprobs"] == [expected]
    assert list(written["top_logprobs"][0]) == list(expected)
    assert written["text_offset"] == [3]


def test_of_two_tokens_with_one_text_the_more_likely_one_is_written():
    entry = TokenLogprobs(1, -3.0, 2, ((2, -1.0), (1, -3.0)))
    written = completion_logprobs([entry], [0], lambda _, p: Word("same", (1,), p), top=2)
    assert written["top_logprobs"] == [{"same": -1.0}]
    assert written["token_logprobs"] == [-3.0]


def test_the_first_token_of_an_echo_is_predicted_by_nothing():
    entry = TokenLogprobs(2, -2.0, 2, TOP)
    assert completion_logprobs([0, entry], [0, 1], spell, top=1) == {
        "tokens": ["a", "c"],
        "token_logprobs": [None, -2.0],
        "top_logprobs": [None, {"b": -0.1, "c": -2.0}],
        "text_offset": [0, 1],
    }


def test_a_prompt_is_written_by_id_with_ranks():
    entry = TokenLogprobs(9, -7.0, 40, TOP)
    assert prompt_logprobs([entry], spell, top=4) == [
        None,
        {
            "9": {"logprob": -7.0, "rank": 40, "decoded_token": "j"},
            "1": {"logprob": -0.1, "rank": 1, "decoded_token": "b"},
            "2": {"logprob": -2.0, "rank": 2, "decoded_token": "c"},
            "3": {"logprob": -2.0, "rank": 2, "decoded_token": "d"},
            "4": {"logprob": -5.0, "rank": 4, "decoded_token": "e"},
        },
    ]


def test_a_prompt_token_that_is_among_the_most_likely_stands_once():
    entry = TokenLogprobs(2, -2.0, 2, TOP)
    _, place = prompt_logprobs([entry], spell, top=2)
    assert list(place) == ["2", "1"]
    assert place["2"]["rank"] == 2


def test_a_prompt_of_one_token_has_one_null():
    assert prompt_logprobs((), spell, top=2) == [None]
