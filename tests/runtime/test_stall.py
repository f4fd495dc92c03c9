"""The watchdog's judgement, without a thread."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.runtime.stall import (
    LONGEST_PERIOD_S,
    MOST_PERIODS_PER_LOOK,
    Watched,
    period_s,
)

#: Gaps between two looks, in periods, and what is computed at the second one.
LOOKS = st.lists(
    st.tuples(st.floats(0, 100), st.none() | st.integers(0, 3)), min_size=1, max_size=10
)
PERIOD_S = 0.5


def watch(looks):
    """What was seen after each look, and how long the step had then really lasted."""
    now, began = 0.0, None
    watched = Watched(now)
    for periods, step in looks:
        now += periods * PERIOD_S
        if step is None:
            began = None
        elif step != watched.step:
            began = now
        watched = watched.look(now, step, period_s=PERIOD_S)
        yield watched, 0.0 if began is None else now - began


@given(LOOKS)
def test_no_more_is_seen_of_a_step_than_has_passed(looks):
    for watched, lasted in watch(looks):
        assert watched.seen_s <= lasted + 1e-9


@given(LOOKS)
def test_one_look_sees_two_periods_at_most(looks):
    before = 0.0
    for watched, _ in watch(looks):
        assert watched.seen_s <= before + MOST_PERIODS_PER_LOOK * PERIOD_S
        before = watched.seen_s


@given(st.lists(st.floats(0, MOST_PERIODS_PER_LOOK), max_size=10))
def test_who_looks_about_on_time_sees_all(gaps):
    looks = [(1.0, 7), *((gap, 7) for gap in gaps)]
    *_, (watched, lasted) = watch(looks)
    assert watched.seen_s == pytest.approx(lasted)


def test_a_new_step_starts_from_nothing_and_so_does_none():
    watched = Watched(0.0, step=1, seen_s=59.0)
    assert not watched.look(1.0, 2, period_s=1.0).stalled(60)
    assert watched.look(1.0, None, period_s=1.0).seen_s == 0
    assert watched.look(1.0, 1, period_s=1.0).stalled(60)


def test_a_clock_that_goes_back_takes_nothing_away():
    assert Watched(10.0, step=1, seen_s=3.0).look(5.0, 1, period_s=1.0).seen_s == 3.0


@given(st.floats(0.001, 1_000_000))
def test_a_stall_is_found_within_two_periods_of_its_timeout(timeout_s):
    period = period_s(timeout_s)
    assert 0 < period <= LONGEST_PERIOD_S
    # The step begins right after a look at something else.
    watched, now, looks = Watched(0.0).look(0.0, 0, period_s=period), 0.0, 0
    while not watched.stalled(timeout_s) and looks < 100:
        now, looks = now + period, looks + 1
        watched = watched.look(now, 1, period_s=period)
    if looks < 100:
        assert timeout_s <= now <= (timeout_s + 2 * period) * (1 + 1e-9)
