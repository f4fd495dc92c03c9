from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from triolet.errors import QueueFullError
from triolet.runtime.admission import (
    RATE_GRAIN_S,
    RETRY_AFTER_MAX_S,
    RETRY_AFTER_MIN_S,
    Admission,
    Rate,
)


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
    assert admission.retry_after_s(30.0, places=3) == 30
    # An hour later nobody knows anything from that.
    assert admission.retry_after_s(3630.0) == RETRY_AFTER_MIN_S


def test_retry_after_stays_within_what_clients_honour():
    admission = Admission(max_live=2)
    for second in (0.0, 500.0):
        admission.enter(second)
        admission.leave(second)
    assert admission.retry_after_s(501.0) == RETRY_AFTER_MAX_S


def test_a_queue_with_too_many_tokens_takes_no_more_and_says_when():
    admission = Admission(max_live=9, max_queued_tokens=100)
    for second, prompt in enumerate("abcd"):
        admission.enter(0.0)
        admission.wait(0.0, {prompt: 20})
        if prompt < "d":
            admission.started(10.0 * second, prompt)
    # 20 tokens in 10 s, and 20 wait: 85 more are 5 too many.
    admission.enter(20.0)
    with pytest.raises(QueueFullError, match="85") as refused:
        admission.wait(20.0, {"e": 85})
    assert refused.value.retry_after_s == 3
    # With 300 more all that waits has to go first.
    with pytest.raises(QueueFullError) as refused:
        admission.wait(20.0, {"e": 300})
    assert refused.value.retry_after_s == 10
    admission.wait(20.0, {"e": 80})
    assert (admission.queued, admission.queued_tokens) == (2, 100)


def test_a_request_of_any_size_is_let_in_where_nothing_waits():
    admission = Admission(max_live=9, max_queued_tokens=100)
    admission.enter(0.0)
    admission.wait(0.0, {"a:0": 300, "a:1": 300})
    assert (admission.queued, admission.queued_tokens, admission.live) == (2, 600, 2)
    admission.enter(0.0)
    with pytest.raises(QueueFullError):
        admission.wait(0.0, {"b": 1})


def test_a_refusal_takes_nothing():
    admission = Admission(max_live=2, max_queued_tokens=100)
    admission.enter(0.0)
    with pytest.raises(QueueFullError, match="holds 1 requests"):
        admission.wait(0.0, {"a:0": 1, "a:1": 1, "a:2": 1})
    assert (admission.queued, admission.queued_tokens, admission.live) == (0, 0, 1)


def test_who_gives_up_in_the_queue_does_not_make_the_engine_look_fast():
    admission = Admission(max_live=99, max_queued_tokens=100)
    for second in range(10):
        admission.enter(0.0)
        admission.wait(0.0, {f"{second}": 10})
    admission.started(0.0, "0")
    admission.started(20.0, "1")  # 10 tokens in 20 s
    for number in range(2, 7):
        admission.leave(20.0, [f"{number}"])
    admission.enter(20.0)
    with pytest.raises(QueueFullError) as refused:
        admission.wait(20.0, {"more": 85})
    assert refused.value.retry_after_s == 30


EVENTS = st.lists(st.tuples(st.floats(RATE_GRAIN_S, 100), st.integers(1, 10_000)), max_size=40)


def counted(events, factor=1.0):
    rate, now_s = Rate(), 0.0
    for gap_s, amount in events:
        now_s += gap_s * factor
        rate.count(now_s, amount)
    return rate, now_s


@given(EVENTS, st.integers(0, 10**6), st.integers(0, 10**6))
def test_more_takes_no_less_time(events, amount, further):
    rate, now_s = counted(events)
    assert rate.seconds_for(amount + further, now_s) >= rate.seconds_for(amount, now_s) >= 0


@given(EVENTS, st.integers(0, 10**6))
def test_the_same_at_half_the_speed_takes_no_less_time(events, amount):
    fast, now_s = counted(events)
    slow, later_s = counted(events, factor=2.0)
    assert slow.seconds_for(amount, later_s) >= fast.seconds_for(amount, now_s) * (1 - 1e-9)


def test_all_that_one_step_does_is_one_event():
    rate = Rate()
    for step in range(5):
        for place in range(100):
            rate.count(step + place * RATE_GRAIN_S / 200, 1)
    assert rate.seconds_for(100, 4.5) == pytest.approx(1, rel=0.01)


class Door(RuleBasedStateMachine):
    """Requests come, wait, start and leave as they like; the books are kept beside it."""

    arrived, admitted = Bundle("arrived"), Bundle("admitted")

    def __init__(self):
        super().__init__()
        self.now_s, self.number = 0.0, 0
        self.places, self.waiting = {}, {}

    @initialize(max_live=st.integers(1, 8), max_tokens=st.none() | st.integers(1, 100))
    def open(self, max_live, max_tokens):
        self.admission = Admission(max_live=max_live, max_queued_tokens=max_tokens)

    @rule(seconds=st.floats(0, 30))
    def pass_time(self, seconds):
        self.now_s += seconds

    @rule(target=arrived)
    def arrive(self):
        self.number += 1
        request = f"r{self.number}"
        full = sum(self.places.values()) == self.admission.max_live
        if self.refused(full, lambda: self.admission.enter(self.now_s)):
            return None
        self.places[request] = 1
        return request

    @rule(
        target=admitted,
        request=consumes(arrived),
        sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    )
    def wait(self, request, sizes):
        if request is None:
            return None
        prompts = {f"{request}:{number}": tokens for number, tokens in enumerate(sizes)}
        places = sum(self.places.values()) + len(prompts) - 1
        queued, limit = sum(self.waiting.values()), self.admission.max_queued_tokens
        too_long = limit is not None and queued and queued + sum(sizes) > limit
        full = bool(too_long) or places > self.admission.max_live
        if self.refused(full, lambda: self.admission.wait(self.now_s, prompts)):
            self.leave(request)
            return None
        self.places[request] = len(prompts)
        self.waiting |= prompts
        return request

    @rule(request=admitted, number=st.integers(0, 3))
    def start(self, request, number):
        prompt = f"{request}:{number}"
        self.admission.started(self.now_s, prompt)
        self.waiting.pop(prompt, None)

    @rule(request=consumes(arrived))
    def go_early(self, request):
        self.leave(request)

    @rule(request=consumes(admitted))
    def go(self, request):
        self.leave(request)

    def leave(self, request):
        places = self.places.pop(request, 0)
        if not places:
            return
        prompts = [f"{request}:{number}" for number in range(places)]
        self.admission.leave(self.now_s, prompts, places=places)
        for prompt in prompts:
            self.waiting.pop(prompt, None)

    def refused(self, expected, take):
        before = self.admission.live, self.admission.queued, self.admission.queued_tokens
        if not expected:
            take()
            return False
        with pytest.raises(QueueFullError) as caught:
            take()
        assert RETRY_AFTER_MIN_S <= caught.value.retry_after_s <= RETRY_AFTER_MAX_S
        after = self.admission.live, self.admission.queued, self.admission.queued_tokens
        assert after == before
        return True

    @precondition(lambda self: hasattr(self, "admission"))
    @invariant()
    def the_books_agree(self):
        admission = self.admission
        assert admission.live == sum(self.places.values()) <= admission.max_live
        assert admission.queued == len(self.waiting) <= admission.live
        assert admission.queued_tokens == sum(self.waiting.values())

    def teardown(self):
        for request in tuple(self.places):
            self.leave(request)
        if hasattr(self, "admission"):
            admission = self.admission
            assert (admission.live, admission.queued, admission.queued_tokens) == (0, 0, 0)


test_every_place_and_token_is_given_back_once = pytest.mark.slow(Door.TestCase)
