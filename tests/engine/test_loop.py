from __future__ import annotations

import itertools
import logging

import pytest

from triolet.core import (
    EngineRequest,
    FinishReason,
    RequestFailure,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)
from triolet.engine.blocks import BlockPool
from triolet.engine.loop import MAX_CONSECUTIVE_FAILURES, Engine
from triolet.engine.plan import NOT_FINITE, NOTHING_LEFT, Sample, StepSamples
from triolet.engine.scheduler import Scheduler
from triolet.errors import EngineError

SCORE = TokenLogprobs(1, -0.5, 1)
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
        return sampled(*(chunk.output_index + 1 for chunk in plan.chunks if chunk.samples))

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


def request(name="a", prompt=(1, 2, 3), max_tokens=3, n=1, **sampling):
    return EngineRequest(RequestId(name), tuple(prompt), SamplingParams(max_tokens, **sampling), n)


def sampled(*ids, scores=None):
    return StepSamples(tuple(map(Sample, ids)), scores or {})


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


@pytest.mark.parametrize("ids", [[], [1, 2]], ids=["too few", "too many"])
def test_a_wrong_number_of_ids_fails_the_step(engine, runner, ids, caplog):
    engine.add(request())
    runner.script = [sampled(*ids)]
    assert failed(engine.step()) == ["a"]
    assert f"gave {len(ids)} ids" in caplog.text
    assert runner.resets == 1


def test_log_probabilities_that_were_asked_for_and_are_missing_fail_the_step(
    engine, runner, caplog
):
    engine.add(request(logprobs=0))
    runner.script = [sampled(1)]
    assert failed(engine.step()) == ["a"]
    assert "left out log-probabilities" in caplog.text


@pytest.mark.parametrize(
    "scores",
    [{}, {0: (SCORE,)}, {0: (SCORE,) * 3}, {0: (SCORE,) * 2, 1: ()}],
    ids=["none", "too few", "too many", "of a chunk without"],
)
def test_prompt_scores_out_of_line_fail_the_step(engine, runner, scores, caplog):
    engine.add(request(prompt_logprobs=0))
    engine.add(request("b"))
    runner.script = [sampled(1, 1, scores=scores)]
    assert failed(engine.step()) == ["a", "b"]
    assert "scored prompt tokens" in caplog.text


def test_log_probabilities_come_with_their_tokens(engine, runner):
    engine.add(request(logprobs=0, prompt_logprobs=0))
    runner.script = [StepSamples((Sample(1, SCORE),), {0: (SCORE, SCORE)})]
    [output] = engine.step().outputs
    assert output.logprobs == (SCORE,)
    assert output.prompt_logprobs == (SCORE, SCORE)


def test_choices_of_one_request_come_as_outputs_of_their_own(engine):
    engine.add(request(n=3, max_tokens=2))
    outputs = []
    while engine.has_work:
        outputs += engine.step().outputs
    assert sorted((o.choice, o.token_ids, o.finish) for o in outputs) == [
        (choice, ids, finish)
        for choice in range(3)
        for ids, finish in [((1,), None), ((2,), FinishReason.LENGTH)]
    ]


def test_an_impossible_id_of_one_choice_fails_all_choices_of_its_request_once(engine, runner):
    engine.add(request("a", n=2))
    engine.add(request("b"))
    runner.script = [sampled(99, 99, 49)]
    result = engine.step()
    assert failed(result) == ["a"]
    assert tokens(result) == [("b", 49)]
    assert engine.statistics().used_rows == 1
    assert engine.statistics().late_aborts == 0
    assert runner.resets == 0


def test_a_failed_step_fails_a_request_of_many_choices_once(engine, runner):
    engine.add(request("a", n=3))
    runner.script = [RuntimeError(SECRET)]
    assert failed(engine.step()) == ["a"]
    assert not engine.has_work


@pytest.mark.parametrize("bad", [-3, 50])
def test_an_id_outside_the_vocabulary_fails_its_request_alone(engine, runner, bad, caplog):
    engine.add(request("a"))
    engine.add(request("b"))
    runner.script = [sampled(bad, 49)]
    result = engine.step()
    assert failed(result) == ["a"]
    assert tokens(result) == [("b", 49)]
    assert caplog.records[0].levelno == logging.ERROR
    assert runner.resets == 0
    assert engine.statistics().used_rows == 1


def test_a_request_whose_own_masks_leave_nothing_is_told_so(engine, runner):
    engine.add(request("a"))
    engine.add(request("b"))
    runner.script = [sampled(NOTHING_LEFT, 49)]
    result = engine.step()
    (failure,) = result.failures
    assert failure.request_id == "a"
    assert "allowed_token_ids" in failure.message
    assert tokens(result) == [("b", 49)]


def test_logits_that_are_not_finite_fail_their_request_alone(engine, runner, caplog):
    for name in "abc":
        engine.add(request(name, n=2, max_tokens=2))
    runner.script = [sampled(7, 8, NOT_FINITE, 9)]
    results = []
    while engine.has_work:
        results.append(engine.step())
    assert [failed(result) for result in results if result.failures] == [["b"]]
    [failure] = results[0].failures
    assert "not finite" in failure.message
    assert "Request b got logits that are not finite, for choice 0" in caplog.text
    assert {name for name, _ in tokens(*results[1:])} == {"a", "c"}
    assert len(tokens(*results)) == 8
    assert runner.resets == 0
    stats = engine.statistics()
    assert (stats.used_rows, stats.used_blocks, stats.late_aborts) == (0, 0, 0)


def test_a_prompt_whose_scores_are_not_finite_fails_before_its_first_token(engine, runner, caplog):
    engine.add(request("a", range(20), prompt_logprobs=0))
    runner.script = [
        StepSamples((), {0: (SCORE,) * 16}, unsound_prompts=frozenset({RequestId("a")}))
    ]
    result = engine.step()
    assert failed(result) == ["a"]
    assert "not finite" in result.failures[0].message
    assert "prompt whose numbers are not finite" in caplog.text
    assert not engine.has_work
    assert engine.statistics().used_blocks == 0


@pytest.mark.parametrize("mark", [NOT_FINITE, NOTHING_LEFT])
def test_a_sample_that_could_not_be_owes_no_log_probabilities(engine, runner, mark):
    engine.add(request("a", logprobs=0))
    engine.add(request("b"))
    runner.script = [sampled(mark, 49)]
    result = engine.step()
    assert failed(result) == ["a"]
    assert tokens(result) == [("b", 49)]


def test_a_choice_ended_from_outside_is_not_computed_any_more(engine):
    engine.add(request("a", (1, 2), n=2, max_tokens=3))
    engine.step()
    engine.end_choice(RequestId("a"), 0)
    rest = [engine.step(), engine.step()]
    assert {o.choice for result in rest for o in result.outputs} == {1}
    assert not engine.has_work
    engine.end_choice(RequestId("a"), 1)
    assert engine.statistics().late_aborts == 1


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
