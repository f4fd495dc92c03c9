from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from triolet.stream.policy import Decision, Undelivered, decide

LIMITS = st.builds(Undelivered, st.integers(1, 1000), st.integers(1, 1000))
LEVELS = st.builds(Undelivered, st.integers(0, 2000), st.integers(0, 2000))


@given(LEVELS, LIMITS)
def test_a_running_request_pauses_exactly_from_either_bound_on(level, limit):
    reached = level.bytes >= limit.bytes or level.tokens >= limit.tokens
    expected = Decision.PAUSE if reached else Decision.KEEP
    assert decide(level, limit, paused=False) is expected


@given(LEVELS, LIMITS)
def test_a_paused_request_resumes_exactly_below_half_of_both_bounds(level, limit):
    below = level.bytes < limit.bytes / 2 and level.tokens < limit.tokens / 2
    expected = Decision.RESUME if below else Decision.KEEP
    assert decide(level, limit, paused=True) is expected


@given(LEVELS, LIMITS)
def test_the_same_level_again_changes_nothing(level, limit):
    for paused in (True, False):
        decision = decide(level, limit, paused=paused)
        if decision is not Decision.KEEP:
            assert decide(level, limit, paused=not paused) is Decision.KEEP


@given(LIMITS)
def test_a_reader_that_took_everything_is_never_left_paused(limit):
    assert decide(Undelivered(0, 0), limit, paused=True) is Decision.RESUME
