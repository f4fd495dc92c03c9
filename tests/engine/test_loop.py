from __future__ import annotations

import itertools
import logging

import pytest

from triolet.core import EngineRequest, FinishReason, RequestFailure, RequestId, SamplingParams
from triolet.engine.blocks import BlockPool
from triolet.engine.loop import MAX_CONSECUTIVE_FAILURES, Engine
from triolet.engine.scheduler import Scheduler
from triolet.errors import EngineError

SECRET = "CUDA out of memory at /srv/models/private"


class ScriptedRunner:
    """Counts up from 1 for every sampled id, unless told what to do in the next steps."""

    def __init__(self) -> None:
        self.script: list[object] = []
        self.plans = []
        self.resets = 0
        self.reset_error: Exception | None = None

    def run(self, plan):
        self.plans.append(plan)
        action = self.script.pop(0) if self.script else None
        if isinstance(action, BaseException):
            raise action
        if action is not None:
            return action
        return [chunk.output_index + 1 for chunk in plan.chunks if chunk.samples]

    def reset(self) -> None:
        self.resets += 1
        if self.reset_error is not None:
            raise self.reset_error


@pytest.fixture
def runner():
    return ScriptedRunner()


@pytest.fixture
def engine(runner):
    scheduler = Scheduler(BlockPool(16, 4), 4, 16, 32, frozenset({0}))
    return Engine(scheduler, runner, itertools.count(100).__next__, vocab_size=50)


def request(name="a", prompt=(1, 2, 3), max_tokens=3):
    return EngineRequest(RequestId(name), tuple(prompt), SamplingParams(max_tokens))


def failed(result):
    return [failure.request_id for failure in result.failures]


def tokens(*results):
    return [(o.request_id, *o.token_ids) for result in results for o in result.outputs]


def test_an_idle_engine_has_no_step(engine, runner):
    assert not engine.has_work
    assert engine.step() is None
    assert runner.plans == []


def test_a_request_runs_to_its_end_in_numbered_and_timed_steps(engine):
    engine.add(request())
    results = [engine.step() for _ in range(3)]
    assert tokens(*results) == [("a", 1), ("a", 2), ("a", 3)]
    assert [r.step for r in results] == [1, 2, 3]
    assert [r.first_scheduled for r in results] == [("a",), (), ()]
    assert [(r.started_ns, r.sampled_ns) for r in results] == [(100, 101), (102, 103), (104, 105)]
    assert results[-1].outputs[0].finish is FinishReason.LENGTH
    assert not engine.has_work
    assert engine.statistics().used_blocks == 0


def test_only_paused_requests_are_no_work(engine):
    engine.add(request())
    engine.step()
    engine.pause(RequestId("a"))
    assert not engine.has_work
    assert engine.step() is None
    engine.resume(RequestId("a"))
    assert tokens(engine.step()) == [("a", 2)]


def test_an_abort_costs_no_further_step_and_a_late_one_is_counted(engine):
    engine.add(request())
    engine.step()
    engine.abort(RequestId("a"))
    assert not engine.has_work
    engine.abort(RequestId("a"))
    stats = engine.statistics()
    assert (stats.used_blocks, stats.used_rows, stats.late_aborts) == (0, 0, 1)


def test_a_request_that_can_never_run_fails_alone_in_the_next_step(engine, runner):
    engine.add(request("long", range(32)))
    assert engine.has_work
    result = engine.step()
    assert failed(result) == ["long"]
    assert "32 tokens" in result.failures[0].message
    assert runner.plans == []
    assert not engine.has_work
    engine.add(request("empty", ()))
    engine.add(request("a"))
    result = engine.step()
    assert failed(result) == ["empty"]
    assert tokens(result) == [("a", 1)]


def test_an_id_added_twice_is_the_callers_error(engine):
    engine.add(request())
    with pytest.raises(EngineError):
        engine.add(request())


def test_a_failed_step_fails_its_requests_and_the_others_are_computed_again(engine, runner, caplog):
    engine.add(request("bystander"))
    first = engine.step()
    engine.pause(RequestId("bystander"))
    engine.add(request("a"))
    engine.add(request("b"))
    runner.script = [RuntimeError(SECRET)]
    result = engine.step()
    assert failed(result) == ["a", "b"]
    assert result.outputs == ()
    assert result.first_scheduled == ("a", "b")
    assert runner.resets == 1
    assert engine.statistics().used_blocks == 0
    engine.resume(RequestId("bystander"))
    rest = [engine.step(), engine.step()]
    assert tokens(first, *rest) == [("bystander", 1), ("bystander", 2), ("bystander", 3)]
    assert runner.plans[2].chunks[0].token_ids == (1, 2, 3, 1)
    assert runner.plans[2].chunks[0].start == 0
    assert not engine.has_work


def test_a_failure_tells_the_log_all_and_the_client_nothing_of_the_inside(engine, runner, caplog):
    engine.add(request())
    runner.script = [RuntimeError(SECRET)]
    result = engine.step()
    assert SECRET in caplog.text
    assert "Traceback" in caplog.text
    [failure] = result.failures
    assert isinstance(failure, RequestFailure)
    assert SECRET not in failure.message
    assert "try again" in failure.message.lower()


@pytest.mark.parametrize("sampled", [[], [1, 2]], ids=["too few", "too many"])
def test_a_wrong_number_of_ids_fails_the_step(engine, runner, sampled, caplog):
    engine.add(request())
    runner.script = [sampled]
    assert failed(engine.step()) == ["a"]
    assert f"gave {len(sampled)} ids" in caplog.text
    assert runner.resets == 1


@pytest.mark.parametrize("bad", [-1, 50])
def test_an_id_outside_the_vocabulary_fails_its_request_alone(engine, runner, bad, caplog):
    engine.add(request("a"))
    engine.add(request("b"))
    runner.script = [[bad, 49]]
    result = engine.step()
    assert failed(result) == ["a"]
    assert tokens(result) == [("b", 49)]
    assert caplog.records[0].levelno == logging.ERROR
    assert runner.resets == 0
    assert engine.statistics().used_rows == 1


def test_a_runner_that_cannot_be_reset_ends_the_engine(engine, runner):
    engine.add(request())
    runner.script = [RuntimeError("one")]
    runner.reset_error = RuntimeError("two")
    with pytest.raises(EngineError, match="rebuilt") as caught:
        engine.step()
    assert str(caught.value.__cause__) == "two"


def test_failures_in_a_row_end_the_engine_and_a_good_step_forgives(engine, runner):
    def fail_steps(count):
        for _ in range(count):
            engine.add(request())
            runner.script = [RuntimeError("again")]
            engine.step()

    fail_steps(MAX_CONSECUTIVE_FAILURES - 1)
    engine.add(request("good", max_tokens=1))
    engine.step()
    fail_steps(MAX_CONSECUTIVE_FAILURES - 1)
    with pytest.raises(EngineError, match="in a row"):
        fail_steps(1)


def test_what_is_no_exception_is_not_swallowed(engine, runner):
    engine.add(request())
    runner.script = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
