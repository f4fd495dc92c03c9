from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.errors import QueueFullError
from triolet.runtime.admission import RETRY_AFTER_MAX_S, RETRY_AFTER_MIN_S, Admission


def test_one_more_than_the_limit_is_refused_and_told_when_to_come_back():
    admission = Admission(max_live=2)
    admission.enter(0.0)
    admission.enter(0.0)
    with pytest.raises(QueueFullError) as refused:
        admission.enter(0.0)
    assert refused.value.retry_after_s == RETRY_AFTER_MIN_S
    assert admission.live == 2


def test_retry_after_follows_the_rate_at_which_requests_end():
    admission = Admission(max_live=5)
    for _ in range(5):
        admission.enter(0.0)
    for second in (10.0, 20.0, 30.0):
        admission.leave(second)
    assert admission.retry_after_s(30.0) == 10
    # An hour later nobody knows anything from that.
    assert admission.retry_after_s(3630.0) == RETRY_AFTER_MIN_S


def test_retry_after_stays_within_what_clients_honour():
    admission = Admission(max_live=2)
    for second in (0.0, 500.0):
        admission.enter(second)
        admission.leave(second)
    assert admission.retry_after_s(501.0) == RETRY_AFTER_MAX_S


@given(st.lists(st.booleans()), st.integers(1, 5))
def test_the_limit_is_never_exceeded_and_places_come_back(arrivals, max_live):
    admission = Admission(max_live=max_live)
    held = 0
    for now, arrives in enumerate(arrivals):
        if arrives:
            if held == max_live:
                with pytest.raises(QueueFullError) as refused:
                    admission.enter(float(now))
                assert RETRY_AFTER_MIN_S <= refused.value.retry_after_s <= RETRY_AFTER_MAX_S
            else:
                admission.enter(float(now))
                held += 1
        elif held:
            admission.leave(float(now))
            held -= 1
        assert admission.live == held <= max_live
