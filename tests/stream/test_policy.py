from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from triolet.stream.policy import Decision, decide

LIMITS = st.integers(1, 1000)
BYTES = st.integers(0, 2000)


@given(BYTES, LIMITS)
def test_a_running_request_pauses_exactly_from_the_bound_on(undelivered, limit):
    expected = Decision.PAUSE if undelivered >= limit else Decision.KEEP
    assert decide(undelivered, paused=False, limit_bytes=limit) is expected


@given(BYTES, LIMITS)
def test_a_paused_request_resumes_exactly_below_half_of_the_bound(undelivered, limit):
    expected = Decision.RESUME if undelivered < limit / 2 else Decision.KEEP
    assert decide(undelivered, paused=True, limit_bytes=limit) is expected


@given(st.lists(BYTES), LIMITS)
def test_pause_and_resume_alternate_at_least_half_the_bound_apart(levels, limit):
    paused, turns = False, []
    for level in levels:
        decision = decide(level, paused, limit)
        if decision is not Decision.KEEP:
            turns.append((decision, level))
            paused = decision is Decision.PAUSE
            # The same level again changes nothing.
            assert decide(level, paused, limit) is Decision.KEEP
    for (before, low), (after, high) in pairwise(turns):
        assert before is not after
        assert abs(high - low) * 2 > limit


@given(LIMITS)
def test_a_reader_that_took_everything_is_never_left_paused(limit):
    assert decide(0, paused=True, limit_bytes=limit) is Decision.RESUME
