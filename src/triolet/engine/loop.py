"""What the engine thread drives: plan a step, run it, say what came of it.

Theory of operation
-------------------

The thread that owns an :class:`Engine` is the only one that touches it. It hands in what
clients want (``add``, ``abort``, ``end_choice``, ``pause``, ``resume``), and calls
:meth:`Engine.step` while ``has_work``. Nothing here waits.

A step that fails in the runner (out of memory, a bad kernel) costs the requests of that step
and nothing else: they end as failures, the runner rebuilds its KV, every other sequence that
had KV is computed again, and the engine lives on. Where that does not help, it raises
:class:`~triolet.errors.EngineError`, and the thread is meant to die of it.

A sampled id outside the vocabulary, a request that leaves no id to choose and logits that are not
finite are the failure of their own request alone, all choices of it. The others of the step get
what they would have got without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import attrs

from triolet.core import RequestFailure, RequestId, StepResult
from triolet.engine.plan import NOT_FINITE, NOTHING_LEFT
from triolet.engine.scheduler import Scheduler
from triolet.errors import ClientError, EngineError

if TYPE_CHECKING:
    from triolet.core import EngineRequest, EngineStatistics
    from triolet.engine.plan import StepPlan, StepSamples

logger = logging.getLogger(__name__)

# Steps. A request that breaks its step goes with that step, so a few in a row can still be a
# few bad requests; a device that has gone fails them all, and each costs a rebuilt KV pool.
MAX_CONSECUTIVE_FAILURES = 5

_STEP_FAILURE = (
    "The model failed while it computed this request. Try again, and report it if it happens again."
)
_NOTHING_LEFT_FAILURE = (
    "What this request allows and forbids leaves no token to choose: check allowed_token_ids, "
    "bad_words, logit_bias and min_tokens."
)
_NOT_FINITE_FAILURE = (
    "The model computed numbers that are not finite (NaN or infinity) for this request; it cannot "
    "go on. The same prompt will most likely fail again."
)
_ID_FAILURE = "The model produced a token outside its vocabulary; this request cannot go on."


class Runner(Protocol):
    """Runs the model. Owns the KV tensors, the attention and the sampler."""

    def run(self, plan: StepPlan) -> StepSamples:
        """Compute all chunks of a step.

        Returns one sample per chunk with ``samples``, in the order of the chunks, with
        log-probabilities where ``chunk.sampling.logprobs`` asks for them; and for each chunk with
        ``scores_prompt``, by its index in the plan, as many entries as ``chunk.scores`` says.
        """

    def reset(self) -> None:
        """Rebuild the KV after a failed step. What it held is lost."""


@attrs.define(eq=False)
class Engine:
    """Drives a scheduler and a runner; the module says how.

    ``clock`` gives nanoseconds and never goes back. With ``vocab_size``, sampled ids at or
    above it fail their request; negative ones always do.
    """

    _scheduler: Scheduler
    _runner: Runner
    _clock: Callable[[], int] = time.monotonic_ns
    _vocab_size: int | None = attrs.field(default=None, kw_only=True)
    _step: int = attrs.field(default=0, init=False)
    _failed_in_a_row: int = attrs.field(default=0, init=False)
    # Requests refused in add(); the next step says so. Emptied there, so as bounded as
    # what the caller adds between two steps.
    _refused: list[RequestFailure] = attrs.field(factory=list, init=False)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. One that can never run is a failure of the next step.

        Raises:
            EngineError: The id is held already.
        """
        try:
            self._scheduler.add(request)
        except ClientError as error:
            self._refused.append(RequestFailure(request.id, error.message))

    def abort(self, request_id: RequestId) -> None:
        """Drop a request; a no-op, but counted, where the id is not held."""
        self._scheduler.abort(request_id)

    def end_choice(self, request_id: RequestId, choice: int) -> None:
        """Drop one choice; a no-op, but counted, where it is not held."""
        self._scheduler.end_choice(request_id, choice)

    def pause(self, request_id: RequestId) -> None:
        """Compute nothing for this request until resumed. Idempotent."""
        self._scheduler.pause(request_id)

    def resume(self, request_id: RequestId) -> None:
        """Undo :meth:`pause`. Idempotent."""
        self._scheduler.resume(request_id)

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to say. Not so while all requests are paused."""
        return bool(self._refused) or self._scheduler.has_work

    def statistics(self) -> EngineStatistics:
        """What the engine holds now."""
        return self._scheduler.statistics()

    def step(self) -> StepResult | None:
        """Compute one step, or return ``None`` where there is no work.

        Raises:
            EngineError: The runner cannot be brought back. The engine is of no use any more.
        """
        started_ns = self._clock()
        failures, self._refused = self._refused, []
        plan = self._scheduler.plan()
        if plan is None and not failures:
            return None
        outputs = []
        first_scheduled: tuple[RequestId, ...] = ()
        sampled_ns = started_ns
        if plan is not None:
            first_scheduled = plan.first_scheduled
            result = self._run(plan)
            sampled_ns = self._clock()
            if result is None:
                failures += self._recover(plan)
            else:
                self._failed_in_a_row = 0
                failures += self._drop_impossible(plan, result)
                outputs = self._scheduler.apply(plan, result)
        self._step += 1
        return StepResult(
            step=self._step,
            outputs=tuple(outputs),
            failures=tuple(failures),
            first_scheduled=first_scheduled,
            started_ns=started_ns,
            sampled_ns=sampled_ns,
        )

    def _run(self, plan: StepPlan) -> StepSamples | None:
        """What came of the step, or ``None`` where it failed."""
        try:
            result = self._runner.run(plan)
            _expect_all(plan, result)
        except Exception:
            logger.exception("Step failed with %d sequences in it", len(plan.chunks))
            return None
        return result

    def _recover(self, plan: StepPlan) -> list[RequestFailure]:
        dropped = self._scheduler.fail(plan)
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= MAX_CONSECUTIVE_FAILURES:
            raise EngineError(
                f"{self._failed_in_a_row} steps failed in a row; the log has the traceback of each."
            )
        try:
            self._runner.reset()
        except Exception as error:
            raise EngineError("The KV pool could not be rebuilt after a failed step.") from error
        return [RequestFailure(request_id, _STEP_FAILURE) for request_id in dropped]

    def _drop_impossible(self, plan: StepPlan, result: StepSamples) -> list[RequestFailure]:
        """Abort whoever cannot go on, so that apply() drops its tokens and the request."""
        failed: dict[RequestId, RequestFailure] = {}
        unsound = set(result.unsound_prompts)
        for request_id in sorted(result.unsound_prompts):
            logger.error("Request %s has a prompt whose numbers are not finite", request_id)
            failed[request_id] = RequestFailure(request_id, _NOT_FINITE_FAILURE)
        sampling = [chunk for chunk in plan.chunks if chunk.samples]
        for chunk, sample in zip(sampling, result.samples, strict=True):
            token, request_id = sample.token_id, chunk.request_id
            if token >= 0 and (self._vocab_size is None or token < self._vocab_size):
                continue
            if token == NOTHING_LEFT:
                message = _NOTHING_LEFT_FAILURE
            elif token == NOT_FINITE:
                message = _NOT_FINITE_FAILURE
                if request_id not in unsound:
                    unsound.add(request_id)
                    logger.error(
                        "Request %s got logits that are not finite, for choice %d",
                        request_id,
                        chunk.choice,
                    )
            else:
                message = _ID_FAILURE
                logger.error(
                    "Request %s sampled id %d, outside the vocabulary, for choice %d",
                    request_id,
                    token,
                    chunk.choice,
                )
            failed.setdefault(request_id, RequestFailure(request_id, message))
        for request_id in failed:
            self._scheduler.abort(request_id, unsound=request_id in unsound)
        return list(failed.values())


def _expect_all(plan: StepPlan, result: StepSamples) -> None:
    """Count what a runner gave: apply() relies on it."""
    if len(result.samples) != plan.samples:
        raise EngineError(
            f"The runner gave {len(result.samples)} ids for a step that samples {plan.samples}."
        )
    sampling = [chunk for chunk in plan.chunks if chunk.samples]
    for chunk, sample in zip(sampling, result.samples, strict=True):
        owed = chunk.sampling.logprobs is not None and sample.token_id >= 0
        if owed and sample.logprobs is None:
            raise EngineError("The runner left out log-probabilities that a request asked for.")
    given = {index: len(entries) for index, entries in result.prompt_logprobs.items()}
    due = {index: chunk.scores for index, chunk in enumerate(plan.chunks) if chunk.scores_prompt}
    if given != due:
        raise EngineError(f"The runner scored prompt tokens {given} by chunk, not {due}.")
