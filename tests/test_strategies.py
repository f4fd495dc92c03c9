from __future__ import annotations

import pytest
from hypothesis import find, given
from hypothesis import strategies as st
from tests.strategies import chunked, cut_at, every_place

texts = st.one_of(st.text(), st.binary())


@pytest.mark.slow  # a hundred examples
@given(texts.flatmap(lambda data: st.tuples(st.just(data), chunked(data))))
def test_the_pieces_joined_are_the_data(cut):
    data, pieces = cut
    assert data[:0].join(pieces) == data


@pytest.mark.slow  # a hundred examples
@given(texts)
def test_every_place_cuts_single_pieces(data):
    assert all(len(piece) == 1 for piece in every_place(data))
    assert len(every_place(data)) == len(data)


def test_a_repeated_place_gives_an_empty_piece():
    assert cut_at(b"abc", [1, 1, 3]) == (b"a", b"", b"bc", b"")


@pytest.mark.parametrize(
    "wanted",
    [("abc",), ("a", "b", "c"), ("ab", "c"), ("", "abc"), ("a", "", "bc")],
)
def test_every_kind_of_cut_is_tried(wanted):
    assert find(chunked("abc"), lambda pieces: pieces == wanted) == wanted
