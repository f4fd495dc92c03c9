from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from triolet.core import Vocabulary
from triolet.errors import OutputError
from triolet.output.detokenizer import Detokenizer

FAMILY = "👨\u200d👩\u200d👧\u200d👦"
FLAGS = "🇫🇷🇯🇵"
EURO, GRIN, REPLACEMENT = "€".encode(), "😀".encode(), "\ufffd".encode()

# One to four bytes each, joiners and combining marks among them.
LETTERS = "aé\u0301\u200d€\ufffd😀🇫"

PIECES = st.one_of(
    st.binary(max_size=5),
    st.sampled_from([EURO[:1], EURO[1:], GRIN[:2], GRIN[2:], REPLACEMENT, b"\xed\xa0", b"\xed"]),
    st.text(LETTERS, max_size=3).map(str.encode),
)


def pieces_of(pieces, **options):
    """What each piece adds, then what finish adds; piece i is token i."""
    detokenizer = Detokenizer(Vocabulary(tuple(pieces)), **options)
    return [*(detokenizer.push(i) for i in range(len(pieces))), detokenizer.finish()]


@pytest.mark.slow
@given(st.lists(PIECES))
@example([b"a", EURO, b"\xe2", b"x"])
@example([b"\xed", b"\xa0", b"\x80"])
@example([GRIN[:3]])
def test_joined_pieces_are_the_decoding_of_all_bytes(pieces):
    assert "".join(pieces_of(pieces)) == b"".join(pieces).decode(errors="replace")


@pytest.mark.slow
@given(st.lists(PIECES))
def test_no_more_than_an_unfinished_character_is_held(pieces):
    *pushed, tail = pieces_of(pieces)
    whole = b"".join(pieces)
    assert len(tail) <= 2
    for end in range(len(pieces) + 1):
        seen = b"".join(pieces[:end]).decode(errors="replace")
        shown = "".join(pushed[:end])
        # What is missing can only be the U+FFFD of an unfinished tail.
        assert whole.decode(errors="replace").startswith(shown)
        assert set(seen[len(shown) :]) <= {"\ufffd"}


@given(st.text(LETTERS))
@example(FAMILY + FLAGS)
def test_valid_text_in_single_bytes_appears_character_by_character(text):
    pieces = [bytes([byte]) for byte in text.encode()]
    *pushed, tail = pieces_of(pieces)
    assert tail == ""
    # Each character appears whole with its last byte.
    expected = [part for char in text for part in [""] * (len(char.encode()) - 1) + [char]]
    assert pushed == expected


def test_a_literal_replacement_character_appears_at_once():
    assert pieces_of([b"bad ", REPLACEMENT, REPLACEMENT]) == ["bad ", "\ufffd", "\ufffd", ""]


@pytest.mark.parametrize(
    ("tail", "shown"),
    [
        (EURO[:2], "\ufffd"),
        (GRIN[:3], "\ufffd"),
        (b"\xe2" + EURO[:2], "\ufffd\ufffd"),
        # A surrogate is ill-formed from its second byte on: three maximal subparts.
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        (b"\xff\xff", "\ufffd\ufffd"),
    ],
)
def test_an_unfinished_tail_becomes_one_replacement_per_maximal_subpart(tail, shown):
    single = [bytes([byte]) for byte in tail]
    assert "".join(pieces_of([b"x", tail])) == "x" + shown
    assert "".join(pieces_of([b"x", *single])) == "x" + shown


def test_a_character_goes_on_across_a_skipped_special_token():
    vocabulary = Vocabulary((EURO[:1], b"<|end|>", EURO[1:]), frozenset({1}))
    detokenizer = Detokenizer(vocabulary)
    assert [detokenizer.push(i) for i in (0, 1, 2)] == ["", "", "€"]


def test_a_shown_special_token_breaks_an_unfinished_character():
    vocabulary = Vocabulary((EURO[:1], b"<|end|>", EURO[1:]), frozenset({1}))
    detokenizer = Detokenizer(vocabulary, skip_special_tokens=False)
    assert [detokenizer.push(i) for i in (0, 1, 2)] == ["", "\ufffd<|end|>", "\ufffd\ufffd"]


@pytest.mark.parametrize("bad", [-1, 3, 10**9, 1])
def test_an_id_outside_the_vocabulary_is_an_error_and_adds_nothing(bad):
    detokenizer = Detokenizer(Vocabulary((EURO[:2], None, EURO[2:])))
    assert detokenizer.push(0) == ""
    with pytest.raises(OutputError, match=str(bad)):
        detokenizer.push(bad)
    assert detokenizer.push(2) == "€"
