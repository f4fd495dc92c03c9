from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from triolet.core import Vocabulary
from triolet.errors import OutputError
from triolet.output.detokenizer import MAX_UNFINISHED, WINDOW_IDS, Detokenizer

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


# Where decoding takes spaces off the beginning of a text.


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ((), " a a"),  # nothing is known of it, and there always is one
        ((2,), "a a"),
        ((2, 2), "a a"),
        ((2, 1), " a a"),
        ((1, 2), " a a"),
        ((0, 2), " a a"),
    ],
)
def test_a_space_is_taken_off_only_where_the_output_begins_the_text(prompt, shown):
    vocabulary = Vocabulary((b" a", b"b", b"<s>"), frozenset({2}), leading_spaces=1)
    detokenizer = Detokenizer(vocabulary, prompt_ids=prompt)
    assert "".join([*(detokenizer.push(i) for i in (0, 0)), detokenizer.finish()]) == shown


def test_a_special_token_that_is_shown_begins_the_text():
    vocabulary = Vocabulary((b" a", b"<s>"), frozenset({1}), leading_spaces=1)
    detokenizer = Detokenizer(vocabulary, skip_special_tokens=False, prompt_ids=(1,))
    assert detokenizer.push(0) == " a"


@given(st.lists(st.sampled_from([b"", b" ", b"  ", b"a", b" a", b"a "])), st.integers(0, 3))
def test_so_many_spaces_are_taken_off_and_no_others(pieces, count):
    vocabulary = Vocabulary((*pieces, b"<s>"), frozenset({len(pieces)}), leading_spaces=count)
    detokenizer = Detokenizer(vocabulary, prompt_ids=(len(pieces),))
    text = b"".join(pieces).decode()
    spaces = len(text) - len(text.lstrip(" "))
    shown = "".join(detokenizer.push(i) for i in range(len(pieces)))
    assert shown == text[min(count, spaces) :]


# A vocabulary of which only whole sequences can be decoded.


def windowed(tokens, decode, *, special=frozenset(), **options):
    return Detokenizer(Vocabulary((*tokens,), special, decode=decode), **options)


def by_bytes(tokens):
    """What the library does for byte-level tokens."""
    return lambda ids: b"".join(tokens[i] for i in ids).decode(errors="replace")


def without_repetitions(ids):
    """A token's text depends on the one before it, as in CTC."""
    return "".join("abc"[i] for place, i in enumerate(ids) if not place or ids[place - 1] != i)


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40), st.lists(st.integers(0, 2), max_size=80)
)
@example([0, 1, 2] * 9, [2, 2, 1] * 9)
@example([0], [0] * 80)
def test_a_window_shows_what_the_output_adds_to_the_prompt(prompt, ids):
    detokenizer = windowed([b"a", b"b", b"c"], without_repetitions, prompt_ids=prompt)
    shown = [detokenizer.push(i) for i in ids]
    full, before = without_repetitions([*prompt, *ids]), without_repetitions(prompt)
    assert before + "".join(shown) == full
    assert detokenizer.finish() == ""


@pytest.mark.slow
@given(st.lists(PIECES, max_size=60))
@example([b"\xff"] * 40)
@example([REPLACEMENT] * 40)
@example([GRIN[:1], GRIN[1:2], GRIN[2:3], GRIN[3:]] * 10)
def test_a_window_joins_bytes_and_holds_a_few_doubtful_characters(pieces):
    detokenizer = windowed(pieces, by_bytes(pieces))
    whole, shown = by_bytes(pieces)(range(len(pieces))), ""
    for index in range(len(pieces)):
        shown += detokenizer.push(index)
        seen = by_bytes(pieces)(range(index + 1))
        assert whole.startswith(shown)
        assert seen[len(shown) :] == "\ufffd" * (len(seen) - len(shown))
        assert len(seen) - len(shown) <= MAX_UNFINISHED
    assert shown + detokenizer.finish() == whole
    assert detokenizer.finish() == ""


def test_a_window_asks_for_a_bounded_number_of_ids():
    asked = []

    def decode(ids):
        asked.append(len(ids))
        return "\ufffd" * len(ids)

    detokenizer = windowed([b"?"], decode, prompt_ids=(0,) * 1000)
    shown = "".join(detokenizer.push(0) for _ in range(1000))

    assert len(shown) == 1000 - MAX_UNFINISHED
    assert max(asked) == 2 * WINDOW_IDS
    assert len(asked) <= 1000 + 1000 / WINDOW_IDS + 1


@pytest.mark.parametrize("prompt", [(0,), (0, 1), (2, 0, 1)])
def test_a_window_completes_no_character_of_the_prompt(prompt):
    tokens = [EURO[:1], EURO[1:2], EURO[2:], b"x"]
    # As byte fallback does it: a run of bytes is all characters, or U+FFFD for each byte.

    def decode(ids):
        data = b"".join(tokens[i] for i in ids)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "".join(chr(byte) if byte < 0x80 else "\ufffd" for byte in data)

    detokenizer = windowed(tokens, decode, prompt_ids=prompt)
    shown = "".join([*(detokenizer.push(i) for i in (2, 3)), detokenizer.finish()])

    assert shown == "\ufffdx"


def test_what_a_decoder_takes_back_stays_and_nothing_after_it_is_lost():
    tokens = ["it", " '", "s", " ok"]

    def decode(ids):
        return "".join(tokens[i] for i in ids).replace(" 's", "'s")

    detokenizer = windowed([token.encode() for token in tokens], decode)

    assert [detokenizer.push(i) for i in range(4)] == ["it", " '", "s", " ok"]


def test_a_window_leaves_special_tokens_out_or_in():
    tokens = ["a", "<s>", "b"]
    options = {"special": frozenset({1}), "prompt_ids": (1, 0, 1)}

    def text(**more):
        detokenizer = windowed(
            [token.encode() for token in tokens],
            lambda ids: " ".join(tokens[i] for i in ids),
            **options,
            **more,
        )
        return [detokenizer.push(i) for i in (1, 2, 1)]

    assert text() == ["", " b", ""]
    assert text(skip_special_tokens=False) == [" <s>", " b", " <s>"]


def test_an_id_outside_a_windows_vocabulary_is_an_error_and_adds_nothing():
    detokenizer = windowed([b"a", None], lambda ids: "a" * len(ids))
    for bad in (1, 2, -1):
        with pytest.raises(OutputError, match=str(bad)):
            detokenizer.push(bad)
    assert detokenizer.push(0) == "a"
