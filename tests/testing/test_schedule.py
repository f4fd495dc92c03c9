from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.testing.faults import ENGINE_FAULTS, Crash, SlowStep
from triolet.testing.lines import expected, line, prompt_text
from triolet.testing.schedule import KEYS, Ask, Drain, Pause, Schedule, Stage, shrink

seeds = st.integers(0, 2**32)


@given(seeds)
def test_a_seed_is_one_schedule_and_survives_json(seed):
    schedule = Schedule.from_seed(seed, 8)
    assert Schedule.from_seed(seed, 8) == schedule
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert json.loads(schedule.to_json())["seed"] == seed
    assert len(schedule.asks) == 8


def test_schedules_of_some_seeds_have_everything_in_them():
    schedules = [Schedule.from_seed(seed, 100) for seed in range(100)]
    asks = [ask for schedule in schedules for ask in schedule.asks]
    for name in ("chat", "stream", "uploads", "logprobs", "include_usage"):
        assert {getattr(ask, name) for ask in asks} == {True, False}, name
    for name in ("leaves_after_s", "leaves_after_bytes", "cancels_after_s", "timeout_s", "stop"):
        assert any(getattr(ask, name) is not None for ask in asks), name
    assert {len(ask.pauses) for ask in asks} == {0, 2}
    assert {len(ask.prompts) for ask in asks} == {1, 3}
    assert {ask.n for ask in asks} == {1, 2, 4}
    assert {ask.key for ask in asks} == set(range(len(KEYS)))
    assert {len(schedule.drains) for schedule in schedules} == {0, 1, 2}
    assert {type(fault) for s in schedules for fault in s.faults} == set(ENGINE_FAULTS)
    assert len({schedule.stage for schedule in schedules}) > 90
    # A flood: many at the same moment.
    assert any(len({ask.at_s for ask in schedule.asks}) < 80 for schedule in schedules)


@pytest.mark.parametrize(
    "text",
    [
        '{"seed": 1, "events": [{"kind": "Flood"}]}',
        '{"seed": 1, "weather": "fair"}',
        '{"seed": 1, "events": [{"kind": "Drain", "at_s": "soon"}]}',
    ],
)
def test_what_is_no_schedule_is_refused(text):
    with pytest.raises(ValueError, match=r"\$"):
        Schedule.from_json(text)


def test_events_are_told_apart():
    events = (Ask(number=0, pauses=(Pause(1, 2.0),)), Drain(1.0), SlowStep(3, 1.0), Crash(9))
    schedule = Schedule(7, Stage(), events)
    assert schedule.asks == events[:1]
    assert schedule.drains == events[1:2]
    assert schedule.faults == events[2:]
    assert Schedule.from_json(schedule.to_json()) == schedule


@given(st.sets(st.integers(0, 39), min_size=1, max_size=3))
def test_shrinking_leaves_what_matters(wanted):
    asks = tuple(Ask(number=number) for number in range(40))

    def fails(candidate):
        return wanted <= {ask.number for ask in candidate.asks}

    shortest = shrink(Schedule(0, Stage(), asks), fails, plays=1000)
    assert {ask.number for ask in shortest.asks} == wanted


def test_shrinking_gives_up_after_so_many_plays():
    tried = []
    schedule = Schedule(0, Stage(), tuple(Ask(number=number) for number in range(64)))

    def fails(candidate):
        tried.append(candidate)
        return False

    assert shrink(schedule, fails, plays=20) == schedule
    assert len(tried) == 20


@pytest.mark.parametrize(
    ("changed", "text", "tokens", "finish"),
    [
        ({}, "ab né stop \n", 14, "stop"),
        ({"max_tokens": 4}, "ab n", 4, "length"),
        ({"max_tokens": 5}, "ab n\ufffd", 5, "length"),
        ({"stop": "né"}, "ab ", 6, "stop"),
        ({"stop": "zebra"}, "ab né stop \n", 14, "stop"),
        ({"stop": "né", "max_tokens": 6}, "ab ", 6, "stop"),
        ({"words": 0}, "", 1, "stop"),
    ],
)
def test_what_a_choice_comes_to(changed, text, tokens, finish):
    ask = attrs.evolve(Ask(number=0, words=4, max_tokens=40), **changed)
    found = expected(ask, 0)
    assert (found.text, found.tokens, found.finish) == (text, tokens, finish)


def test_prompts_name_their_request_and_lines_differ():
    ask = Ask(number=12, prompts=(20, 8), words=8)
    assert prompt_text(ask, 0) == "#12.0 " + "x" * 14
    assert prompt_text(ask, 1) == "#12.1 xx"
    assert line(ask, 0) != line(ask, 1)
