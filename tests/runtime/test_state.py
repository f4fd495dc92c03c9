from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.runtime.state import ENDED, TRANSITIONS, IllegalMoveError, Move, State, after

LEGAL = {state: [move for from_, move in TRANSITIONS if from_ is state] for state in State}


@st.composite
def paths(draw):
    """Legal moves from the arrival to an end, and what comes after it."""
    state, path = State.RECEIVED, []
    while state not in ENDED and len(path) < 30:
        path.append(draw(st.sampled_from(LEGAL[state])))
        state = TRANSITIONS[state, path[-1]]
    if state not in ENDED:
        path.append(Move.CANCEL)
    return path, draw(st.lists(st.sampled_from(Move)))


@pytest.mark.slow
@given(paths())
def test_every_path_ends_in_exactly_one_end_which_absorbs_everything(drawn):
    path, late = drawn
    state, ends = State.RECEIVED, []
    for move in path + late:
        before, state = state, after(state, move)
        if state in ENDED and state is not before:
            ends.append(state)
    assert ends == [state]


@given(st.sampled_from(State), st.sampled_from(Move))
def test_a_move_is_in_the_table_or_a_bug_or_comes_too_late(state, move):
    if state in ENDED:
        assert after(state, move) is state
    elif (state, move) in TRANSITIONS:
        assert after(state, move) is TRANSITIONS[state, move]
    else:
        with pytest.raises(IllegalMoveError, match=f"{state} cannot {move}"):
            after(state, move)


def test_no_row_of_the_table_leads_out_of_an_end():
    assert not {state for state, _ in TRANSITIONS} & ENDED


def test_every_state_but_the_first_can_be_reached():
    assert {State.RECEIVED, *TRANSITIONS.values()} == set(State)


@pytest.mark.parametrize("state", sorted(set(State) - ENDED))
@pytest.mark.parametrize(
    ("move", "end"), [(Move.CANCEL, State.CANCELLED), (Move.FAIL, State.FAILED)]
)
def test_whatever_has_not_ended_can_be_ended_by_force(state, move, end):
    assert after(state, move) is end


def test_only_what_is_under_way_can_finish_and_only_what_is_not_admitted_be_refused():
    assert {s for s, move in TRANSITIONS if move is Move.FINISH} == {State.RUNNING, State.PAUSED}
    assert {s for s, move in TRANSITIONS if move is Move.REFUSE} == {State.RECEIVED}


@pytest.mark.parametrize("thing", [*State, *Move])
def test_every_name_has_a_sentence(thing):
    assert thing.__doc__.endswith(".")
    assert str(thing) == thing.value
    assert type(thing)(thing.value) is thing
