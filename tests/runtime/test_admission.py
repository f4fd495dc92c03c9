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
        admission.leave(second, "x")
        admission.enter(second)
    assert admission.retry_after_s(30.0) == 10
    assert admission.retry_after_s(30.0, places=3) == 30
    assert admission.retry_after_s(30.0, places=100) == RETRY_AFTER_MAX_S


def test_where_nothing_ends_nobody_need_come_back_soon():
    admission = Admission(max_live=3)
    for _ in range(3):
        admission.enter(0.0)
    for second in (90.0, 180.0, 270.0):
        assert admission.retry_after_s(second - 1) == RETRY_AFTER_MAX_S
        admission.leave(second, "x")
        admission.enter(second)
    assert admission.retry_after_s(271.0) == RETRY_AFTER_MAX_S
    assert admission.retry_after_s(331.0) == RETRY_AFTER_MAX_S


@pytest.mark.parametrize("idle_s", [30.0, 600.0])
def test_the_time_in_which_nobody_came_is_not_the_server_s_pace(idle_s):
    admission = Admission(max_live=3)
    admission.enter(0.0)
    admission.leave(0.0, "x")
    now_s = idle_s
    # From here on always two or three places are taken, and one ends every second.
    for _ in range(2):
        admission.enter(now_s)
    for _ in range(10):
        admission.enter(now_s)
        now_s += 1.0
        admission.leave(now_s, "x")
    assert admission.retry_after_s(now_s, places=10) == 10
    for _ in range(2):
        admission.leave(now_s, "x")
    now_s += idle_s
    for _ in range(3):
        admission.enter(now_s)
    # What was measured before is remembered for a minute, and then is news of yesterday.
    expected = 11 if idle_s < RETRY_AFTER_MAX_S else RETRY_AFTER_MIN_S
    assert admission.retry_after_s(now_s, places=12.1) == expected


def test_who_was_refused_does_not_make_the_server_look_fast():
    admission = Admission(max_live=3)
    for _ in range(3):
        admission.enter(0.0)
    for second in (30.0, 60.0, 90.0):
        admission.leave(second, "x")
        if second < 90.0:
            admission.enter(second)
    now_s = 90.0
    for _ in range(40):
        now_s += 0.03
        admission.enter(now_s)
        admission.turn_back(now_s)
    admission.enter(now_s)
    assert admission.retry_after_s(now_s) == 30


def test_a_queue_with_too_many_tokens_takes_no_more_and_says_when():
    admission = Admission(max_live=9, max_queued_tokens=100)
    for prompt in "abcd":
        admission.enter(0.0)
        admission.wait(0.0, {prompt: 20})
    for second, prompt in enumerate("abc"):
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
    with pytest.raises(QueueFullError):
        admission.wait(0.0, {"a:0": 1, "a:1": 1, "a:2": 1})
    assert (admission.queued, admission.queued_tokens, admission.live) == (0, 0, 1)


def test_a_batch_is_told_how_many_places_are_missing():
    admission = Admission(max_live=10)
    for _ in range(7):
        admission.enter(0.0)
    # It has one of the seven.
    with pytest.raises(QueueFullError, match=r"holds 7 requests, and 5 more .* 9 prompts"):
        admission.wait(0.0, {f"a:{number}": 1 for number in range(9)})


# Many keys.


def taken(admission, tenant, places=1000):
    """How many of so many requests of a tenant get a place, one after another."""
    for number in range(places):
        try:
            admission.enter(0.0, tenant)
        except QueueFullError:
            return number
    return places


@pytest.mark.parametrize(("max_live", "alone"), [(1, 1), (2, 1), (8, 7), (16, 14), (1024, 896)])
def test_one_key_s_flood_leaves_a_place_for_each_of_a_few_others(max_live, alone):
    admission = Admission(max_live=max_live, shared=True)
    assert taken(admission, "flood") == alone == admission.max_at_once
    others = max_live - alone
    assert [taken(admission, f"k{number}") for number in range(others)] == [1] * others
    assert taken(admission, "late") == 0
    assert admission.live == max_live
    # What becomes free is kept again.
    admission.turn_back(0.0, "flood")
    assert taken(admission, "flood") == (1 if alone == 1 else 0)


def test_where_there_is_one_key_nothing_is_kept():
    admission = Admission(max_live=8)
    assert taken(admission, "flood") == 8 == admission.max_at_once


def test_the_last_places_are_for_newcomers_not_for_their_batches():
    admission = Admission(max_live=16, shared=True)
    assert taken(admission, "flood") == 14
    with pytest.raises(QueueFullError, match="of this key"):
        admission.enter(0.0, "flood")
    admission.enter(0.0, "new")
    with pytest.raises(QueueFullError, match=r"and 2 more .* 2 prompts"):
        admission.wait(0.0, {"a:0": 1, "a:1": 1}, "new")
    admission.wait(0.0, {"a:0": 1}, "new")
    admission.leave(0.0, ["a:0"], "new")
    assert taken(admission, "new") == 1


def test_a_full_queue_has_room_for_the_tokens_of_a_key_of_which_nothing_waits():
    admission = Admission(max_live=99, max_queued_tokens=80, shared=True)
    for number in range(7):
        admission.enter(0.0, "flood")
        admission.wait(0.0, {f"f{number}": 10}, "flood")
    admission.enter(0.0, "flood")
    with pytest.raises(QueueFullError, match="10 too many"):
        admission.wait(0.0, {"more": 10}, "flood")
    admission.enter(0.0, "new")
    admission.wait(0.0, {"n0": 10}, "new")
    assert admission.queued_tokens == 80
    admission.enter(0.0, "newer")
    with pytest.raises(QueueFullError):
        admission.wait(0.0, {"m0": 1}, "newer")
    admission.started(0.0, "n0")
    admission.wait(0.0, {"m0": 10}, "newer")


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


EVENTS = st.lists(st.tuples(st.floats(2 * RATE_GRAIN_S, 50), st.integers(1, 10_000)), max_size=40)


def counted(events, factor=1.0):
    rate, now_s = Rate(), 0.0
    rate.work(now_s)
    for gap_s, amount in events:
        now_s += gap_s * factor
        rate.count(now_s, amount)
    return rate, now_s


@pytest.mark.slow
@given(EVENTS, st.integers(0, 10**6), st.integers(0, 10**6))
def test_more_takes_no_less_time(events, amount, further):
    rate, now_s = counted(events)
    assert rate.seconds_for(amount + further, now_s) >= rate.seconds_for(amount, now_s) >= 0


@given(EVENTS, st.lists(st.floats(0, 50), max_size=40), st.integers(0, 10**6))
def test_rests_change_nothing(events, rests, amount):
    straight, end_s = counted(events)
    rate, now_s = Rate(), 0.0
    for (gap_s, happened), rest_s in zip(events, [*rests, *[0.0] * len(events)], strict=False):
        rate.work(now_s)
        now_s += gap_s
        rate.count(now_s, happened)
        rate.rest(now_s)
        rate.count(now_s + rest_s / 2, 10**6)
        now_s += rest_s
    assert rate.seconds_for(amount, now_s) == pytest.approx(
        straight.seconds_for(amount, end_s), rel=1e-6, abs=1e-6
    )


@given(EVENTS, st.integers(0, 10**6))
def test_the_same_at_half_the_speed_takes_no_less_time(events, amount):
    fast, now_s = counted(events)
    slow, later_s = counted(events, factor=2.0)
    assert slow.seconds_for(amount, later_s) >= fast.seconds_for(amount, now_s) * (1 - 1e-9)


def test_all_that_one_step_does_is_one_event():
    rate = Rate()
    rate.work(0.0)
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
        self.owner, self.places, self.waiting = {}, {}, {}

    @initialize(
        max_live=st.integers(1, 20),
        max_tokens=st.none() | st.integers(1, 100),
        shared=st.booleans(),
    )
    def open(self, max_live, max_tokens, shared):
        self.admission = Admission(max_live=max_live, max_queued_tokens=max_tokens, shared=shared)
        self.kept = max(1, max_live // 8) if shared else 0

    @rule(seconds=st.floats(0, 30))
    def pass_time(self, seconds):
        self.now_s += seconds

    @rule(target=arrived, tenant=st.sampled_from("abc"))
    def arrive(self, tenant):
        self.number += 1
        request = f"r{self.number}"
        known = any(self.owner[r] == tenant for r in self.places)
        bound = self.admission.max_live - (self.kept if known else 0)
        full = sum(self.places.values()) >= bound
        if self.refused(full, lambda: self.admission.enter(self.now_s, tenant)):
            return None
        self.owner[request], self.places[request] = tenant, 1
        return request

    @rule(
        target=admitted,
        request=consumes(arrived),
        sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    )
    def wait(self, request, sizes):
        if request is None:
            return None
        tenant = self.owner[request]
        prompts = {f"{request}:{number}": tokens for number, tokens in enumerate(sizes)}
        further = len(prompts) - 1
        places = sum(self.places.values()) + further
        queued, limit = sum(self.waiting.values()), self.admission.max_queued_tokens
        if limit is not None and any(
            self.owner[p.partition(":")[0]] == tenant for p in self.waiting
        ):
            limit -= max(1, limit // 8) if self.kept else 0
        too_long = limit is not None and queued and queued + sum(sizes) > limit
        full = bool(too_long) or (further and places > self.admission.max_live - self.kept)
        if self.refused(full, lambda: self.admission.wait(self.now_s, prompts, tenant)):
            self.turn_back(request)
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
    def turn_back(self, request):
        if self.places.pop(request, 0):
            self.admission.turn_back(self.now_s, self.owner[request])

    @rule(target=arrived, request=consumes(admitted))
    def withdraw(self, request):
        self.give_back(request, self.admission.withdraw)
        if request is not None:
            self.places[request] = 1
        return request

    @rule(request=consumes(admitted))
    def go(self, request):
        self.give_back(request, self.admission.leave)

    def give_back(self, request, how):
        places = self.places.pop(request, 0)
        prompts = [f"{request}:{number}" for number in range(places)]
        if prompts:
            how(self.now_s, prompts, self.owner[request])
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
            waiting = any(prompt.startswith(f"{request}:") for prompt in self.waiting)
            if waiting or self.places[request] > 1:
                self.go(request)
            else:
                self.turn_back(request)
        if hasattr(self, "admission"):
            admission = self.admission
            assert (admission.live, admission.queued, admission.queued_tokens) == (0, 0, 0)
            assert not admission._places
            assert not admission._prompts


test_every_place_and_token_is_given_back_once = pytest.mark.slow(Door.TestCase)
