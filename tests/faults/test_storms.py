"""Seeded storms: hundreds of requests at a time, everything that can go wrong, in virtual time.

A seed that fails says how to play it again. More seeds, and other ones: ``nox -s soak -- MINUTES``.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from triolet.testing.faults import Crash, NeverReturns
from triolet.testing.schedule import Ask, Drain, Pause, Schedule, Stage
from triolet.testing.storm import play

# What they cover others do too, and being measured takes them twice the time.
pytestmark = pytest.mark.no_cover

# Requests of one storm, and the storms: 2,400 requests, in some 8 s of CPU.
SIZE = 100
SEEDS = range(24)


@pytest.fixture(scope="module")
def plays():
    """What the storms came to, as far as they were played."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_breaks_no_rule(seed, plays):
    plays[seed] = play(Schedule.from_seed(seed, SIZE))
    assert not plays[seed].broken, plays[seed].report()


@pytest.mark.slow
def test_the_storms_together_meet_everything(plays):
    plays |= {s: play(Schedule.from_seed(s, SIZE)) for s in SEEDS if s not in plays}
    outcomes = sum((found.outcomes for found in plays.values()), Counter())
    calls = sum((found.calls for found in plays.values()), Counter())
    assert set(outcomes) == {
        "finished",
        "rejected",
        "failed",
        "cancelled:client_cancel",
        "cancelled:disconnect",
        "cancelled:shutdown",
        "cancelled:slow_client",
        "cancelled:timeout",
    }
    assert set(calls) == {"submit", "abort", "end_choice", "pause", "resume"}
    assert outcomes["finished"] > SIZE * len(SEEDS) / 4
    assert sum(found.statistics.preemptions for found in plays.values()) > 0
    assert any(found.schedule.drains for found in plays.values())


@pytest.mark.slow
def test_the_same_seed_is_the_same_play_in_every_process():
    seed, size = 5, 60
    code = (
        "from triolet.testing.storm import play;"
        "from triolet.testing.schedule import Schedule;"
        f"print(play(Schedule.from_seed({seed}, {size})).transcript(), end='')"
    )
    here = play(Schedule.from_seed(seed, size)).transcript()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.decode() == here
    assert here.count("\n") == size
    assert play(Schedule.from_seed(seed + 1, size)).transcript() != here


def test_a_saved_schedule_plays_again_as_it_did():
    schedule = Schedule.from_seed(3, 10)
    again = Schedule.from_json(schedule.to_json())
    assert play(again).transcript() == play(schedule).transcript()


def test_an_answer_that_is_not_what_was_said_is_a_broken_rule(monkeypatch):
    ask = Ask(number=0, words=12, max_tokens=40)
    monkeypatch.setattr("triolet.testing.verdict.line", lambda *_: "something else")
    (complaint,) = play(Schedule(0, Stage(), (ask,))).broken
    assert complaint.startswith("request 0: choice 0 said")


def test_a_reader_that_pauses_pauses_its_request():
    ask = Ask(number=0, words=12, max_tokens=40, pauses=(Pause(1, 20.0),))
    found = play(Schedule(0, Stage(max_stream_buffer=700), (ask,)))
    assert not found.broken
    assert found.calls["pause"] == found.calls["resume"] > 0


def test_a_client_that_reads_too_slowly_is_hung_up_on():
    ask = Ask(number=0, words=12, max_tokens=40, pauses=(Pause(1, 31.0),))
    found = play(Schedule(0, Stage(max_stream_buffer=700, send_timeout=30.0), (ask,)))
    assert not found.broken
    assert found.outcomes == {"cancelled:slow_client": 1}


@pytest.mark.parametrize(
    ("faults", "outcome", "took_s"),
    [
        ((Drain(0.0625),), "cancelled:shutdown", 0.5625),
        ((Drain(0.0625), Drain(0.125)), "cancelled:shutdown", 0.125),
        ((Crash(5),), "failed", 0.15625),
        ((NeverReturns(5),), "failed", 60.125),
    ],
    ids=["a drain", "a second drain", "a crash", "a step that never returns"],
)
def test_what_ends_the_server_ends_whoever_is_there(faults, outcome, took_s):
    asks = tuple(Ask(number=number, words=12, max_tokens=40) for number in range(3))
    stage = Stage(step_s=0.03125, drain_timeout=0.5)
    found = play(Schedule(0, stage, (*asks, *faults)))
    assert not found.broken
    assert found.outcomes == {outcome: 3}
    assert max(story.recorded_s for story in found.stories) == took_s
