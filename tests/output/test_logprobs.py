from __future__ import annotations

import codecs
import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.strategies import chunked

from triolet.core import FinishReason, RequestId, TokenLogprobs, TokenOutput, Vocabulary
from triolet.output.detokenizer import Detokenizer
from triolet.output.events import TextDelta
from triolet.output.logprobs import LOWEST_LOGPROB, SpelledToken, Spelling, TextOffsets
from triolet.output.request import RequestOutput

GRIN = "😀".encode()
TOKENS = (b"a", b" b", GRIN[:1], GRIN[1:3], GRIN[3:], b"\xe2\x82", b"\xff\x01", b"", "é".encode())
SPECIAL, HOLE = len(TOKENS), len(TOKENS) + 1
VOCABULARY = Vocabulary((*TOKENS, b"<s>", None), frozenset({SPECIAL}))
IDS = st.lists(st.integers(0, SPECIAL), max_size=12)
# Pieces that break characters in every way, as a vocabulary of their own.
PIECES = st.lists(
    st.one_of(
        st.binary(max_size=4),
        st.sampled_from([*TOKENS, b"\xed\xa0", b"\xf0\x9f", b"\x80", b"\xe2\xe2", b"\xe2x"]),
    ),
    max_size=8,
)


def plain(token_id, logprob=-1.0):
    return TokenLogprobs(token_id, logprob, 1)


@pytest.mark.slow
@given(
    ids=IDS,
    stops=st.sampled_from([(), ("a b",), ("é", "\ufffd")]),
    include=st.booleans(),
    skip=st.booleans(),
)
@example(ids=[2, SPECIAL, 3, 4], stops=(), include=False, skip=True)
def test_put_together_the_bytes_of_a_choice_are_its_text(ids, stops, include, skip):
    request = RequestOutput(VOCABULARY, (1,), 1, stops, include, skip)
    scored = tuple(plain(token_id) for token_id in ids)
    output = TokenOutput(RequestId("r"), tuple(ids), FinishReason.LENGTH, logprobs=scored)
    events = request.feed(output)
    deltas = [event for event in events if isinstance(event, TextDelta)]
    spelling = Spelling(VOCABULARY, skip)
    entries = [entry for delta in deltas for entry in delta.logprobs]
    spelled = [spelling.token(entry.token_id, entry.logprob) for entry in entries]
    data = bytes(byte for token in spelled for byte in token.data or ())
    text, decoded = "".join(delta.text for delta in deltas), data.decode(errors="replace")
    if events[-2].reason is FinishReason.LENGTH:
        assert decoded == text
    else:
        assert decoded.startswith(text if include else text + events[-2].stop_reason)


@pytest.mark.parametrize(
    ("token_id", "token", "data"),
    [
        (1, " b", (32, 98)),
        (8, "é", (0xC3, 0xA9)),
        (2, "bytes:\\xf0", (0xF0,)),
        (3, "bytes:\\x9f\\x98", (0x9F, 0x98)),
        (6, "bytes:\\xff\\x01", (0xFF, 1)),
        (7, "", ()),
        (SPECIAL, "<s>", None),
        (HOLE, f"token_id:{HOLE}", None),
        (HOLE + 1, f"token_id:{HOLE + 1}", None),
        (-1, "token_id:-1", None),
        (-3, "token_id:-3", None),
    ],
)
def test_a_token_is_spelled_by_its_own_bytes(token_id, token, data):
    assert Spelling(VOCABULARY).token(token_id, -1.0) == SpelledToken(token, data, -1.0)


def test_a_special_token_that_is_shown_has_its_bytes():
    shown = Spelling(VOCABULARY, skip_special_tokens=False).token(SPECIAL, -1.0)
    assert shown == SpelledToken("<s>", (60, 115, 62), -1.0)


def test_spelled_as_ids_tokens_keep_their_bytes():
    spelling = Spelling(VOCABULARY, as_ids=True)
    assert spelling.token(0, -1.0) == SpelledToken("token_id:0", (97,), -1.0)
    assert spelling.token(SPECIAL, -1.0) == SpelledToken(f"token_id:{SPECIAL}", None, -1.0)


@given(st.floats() | st.sampled_from([-math.inf, math.inf, math.nan, LOWEST_LOGPROB]))
def test_no_logprob_is_beyond_what_json_can_carry(logprob):
    written = Spelling(VOCABULARY).token(0, logprob).logprob
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    if LOWEST_LOGPROB <= logprob < math.inf:
        assert written == logprob
    else:
        assert written == LOWEST_LOGPROB


def offsets_of(pieces, start=0):
    offsets = TextOffsets(Detokenizer(Vocabulary(tuple(pieces))), start)
    return [offsets.push(token_id) for token_id in range(len(pieces))]


@pytest.mark.slow
@given(st.text("aé€😀\ufffd", max_size=6).flatmap(lambda text: chunked(text.encode())))
def test_an_offset_is_that_of_the_character_with_the_first_byte_of_the_token(pieces):
    text = b"".join(pieces).decode()
    owners = [index for index, char in enumerate(text) for _ in char.encode()]
    place = 0
    for piece, offset in zip(pieces, offsets_of(pieces), strict=True):
        if piece:
            assert offset == owners[place]
            place += len(piece)


@pytest.mark.slow
@given(PIECES, st.integers(0, 3))
@example([b"\xe2", b"x", b"y"], 0)
def test_an_offset_counts_the_characters_that_were_certain_before(pieces, start):
    new_decoder = codecs.getincrementaldecoder("utf-8")
    before = [b"".join(pieces[:count]) for count in range(len(pieces))]
    certain = [start + len(new_decoder("replace").decode(data)) for data in before]
    assert offsets_of(pieces, start) == certain


def test_tokens_that_share_a_character_share_its_offset():
    offsets = TextOffsets(Detokenizer(VOCABULARY))
    assert [offsets.push(i) for i in (0, 2, 3, 4, 1, 8)] == [0, 1, 1, 1, 2, 4]


def test_a_token_that_adds_nothing_has_the_offset_of_the_next():
    offsets = TextOffsets(Detokenizer(VOCABULARY))
    ids = (SPECIAL, 0, HOLE, 2, SPECIAL, 7, 3, 4, -1, SPECIAL)
    assert [offsets.push(i) for i in ids] == [0, 0, 1, 1, 1, 1, 1, 1, 2, 2]
    shown = TextOffsets(Detokenizer(VOCABULARY, skip_special_tokens=False))
    assert [shown.push(i) for i in (SPECIAL, 0)] == [0, 3]
