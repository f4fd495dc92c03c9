from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.strategies import chunked

from triolet.errors import InvalidRequestError
from triolet.output.stops import Released, StopMatcher

# Few letters, so that stops overlap, contain each other and repeat.
PIECES = st.text("ab€", max_size=30).flatmap(chunked)
STOPS = st.lists(st.text("ab€", min_size=1, max_size=5), max_size=5).map(tuple)


def first_stop(text, stops, after=0):
    """The end of the first match behind ``after`` and its stop, by searching the whole text."""
    for end in range(after + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return len(text), None


def run(stops, pieces, include_stop):
    matcher = StopMatcher(stops, include_stop)
    out, stop = [], None
    for piece in pieces:
        released = matcher.feed(piece)
        assert stop is None or released == Released("")
        out.append(released.text)
        stop = stop or released.stop
    return "".join(out), matcher.finish(), stop


@pytest.mark.slow
@given(pieces=PIECES, stops=STOPS, include=st.booleans())
@example(pieces=("ba", "ab"), stops=("ab", "b", "aab"), include=False)
@example(pieces=("a", "a"), stops=("aa", "a"), include=False)
@example(pieces=("xab",), stops=("ab", "b"), include=False)
@example(pieces=("xab",), stops=("b", "ab"), include=False)
def test_any_chunking_finds_what_a_search_of_the_whole_text_finds(pieces, stops, include):
    text = "".join(pieces)
    end, stop = first_stop(text, stops)
    expected = text[:end] if stop is None or include else text[: end - len(stop)]
    shown, held, found = run(stops, pieces, include)
    assert (shown + held, found) == (expected, stop)
    assert stop is None or held == ""


@pytest.mark.slow
@given(PIECES, STOPS)
def test_exactly_the_longest_suffix_that_may_become_a_stop_is_held(pieces, stops):
    matcher = StopMatcher(stops)
    fed = shown = ""
    for piece in pieces:
        released = matcher.feed(piece)
        if released.stop is not None:
            return
        fed += piece
        shown += released.text
        prefixes = {stop[:size] for stop in stops for size in range(len(stop))} | {""}
        longest = max((p for p in prefixes if fed.endswith(p)), key=len)
        assert (shown, fed[len(shown) :]) == (fed[: len(fed) - len(longest)], longest)
    assert matcher.finish() == fed[len(shown) :]


@pytest.mark.slow
@given(PIECES, STOPS)
def test_nothing_is_held_when_the_stop_is_shown_anyway(pieces, stops):
    matcher = StopMatcher(stops, include_stop=True)
    for piece in pieces:
        released = matcher.feed(piece)
        if released.stop is not None:
            assert piece.startswith(released.text)
            return
        assert released.text == piece
    assert matcher.finish() == ""


@st.composite
def counted_pieces(draw):
    """Pieces of a text, the first of which come before stops count."""
    pieces = draw(PIECES)
    return pieces, draw(st.integers(0, len(pieces)))


@pytest.mark.slow
@given(counted=counted_pieces(), stops=STOPS, include=st.booleans())
@example(counted=(("ab", "c"), 1), stops=("ab", "abc"), include=False)
@example(counted=(("aa", "a"), 1), stops=("aa",), include=False)
@example(counted=(("bab", "a"), 1), stops=("bab", "ab"), include=False)
def test_a_match_that_does_not_count_is_text_and_holds_nothing(counted, stops, include):
    pieces, first = counted
    matcher = StopMatcher(stops, include)
    fed = shown = ""
    for number, piece in enumerate(pieces):
        released = matcher.feed(piece, counts=number >= first)
        end, stop = first_stop(fed + piece, stops, after=len(fed))
        shown += released.text
        if number >= first and stop is not None:
            assert released.stop == stop
            assert shown == (fed + piece)[: end if include else end - len(stop)]
            return
        assert released.stop is None
        fed += piece
        prefixes = {stop[:size] for stop in stops for size in range(len(stop))} | {""}
        longest = "" if include else max((p for p in prefixes if fed.endswith(p)), key=len)
        assert shown == fed[: len(fed) - len(longest)]
    assert shown + matcher.finish() == fed


def test_the_stop_that_ends_first_wins_although_it_starts_later():
    assert StopMatcher(("abcd", "bc")).feed("xabcd") == Released("xa", "bc")


@pytest.mark.parametrize(("stops", "cut"), [(("bc", "abc"), "xa"), (("abc", "bc"), "x")])
def test_the_first_in_the_list_wins_of_those_that_end_together(stops, cut):
    assert StopMatcher(stops).feed("xabc") == Released(cut, stops[0])


def test_fresh_matchers_share_nothing_of_the_text():
    matcher = StopMatcher(("ab",))
    matcher.feed("a")
    assert matcher.fresh().feed("b") == Released("b")
    assert matcher.feed("b") == Released("", "ab")
    assert matcher.fresh().feed("ab") == Released("", "ab")


def test_an_empty_stop_is_refused():
    with pytest.raises(InvalidRequestError) as caught:
        StopMatcher(("a", ""))
    assert caught.value.param == "stop"


def test_steps_per_character_do_not_grow_with_the_number_or_the_length_of_stops():
    """Counted, not timed: a mismatch falls back at most as often as characters matched before."""
    stops = (*("a" * size + "b" for size in range(1, 200)), *(f"c{i}" for i in range(200)))
    matcher = StopMatcher(stops)
    automaton = matcher._automaton
    lookups = 0

    class Counted(dict):
        def get(self, key, default=None):
            nonlocal lookups
            lookups += 1
            return super().get(key, default)

    automaton.goto = [Counted(edges) for edges in automaton.goto]
    text = ("a" * 500 + "x") * 20
    assert matcher.feed(text) == Released(text)
    assert lookups <= 2 * len(text)


def test_building_is_linear_in_the_total_length():
    """States are at most the characters of all stops, plus the root."""
    stops = tuple("a" * 1000 + str(i) for i in range(50))
    automaton = StopMatcher(stops)._automaton
    assert len(automaton.goto) == 1 + 1000 + 10 + 40
