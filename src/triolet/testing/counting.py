"""A backend around a backend that counts what passes through: calls, results, tokens.

It knows of each request whether the engine still holds it, so it can tell an abort that was
needed from one that was not, and one that is missing. :mod:`triolet.testing.settled` asks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import attrs
import trio

from triolet.core import EngineRequest, RequestId, StepResult
from triolet.runtime.backend import Backend
from triolet.runtime.lifecycle import Runtime

if TYPE_CHECKING:
    from types import TracebackType

    from triolet.core import EngineStatistics

#: Results that the runtime may have taken and not read yet when another task of its own aborts:
#: one that waits for its turn, and one of which a request that is on its way out heard nothing.
_RESULTS_UNDER_WAY = 2
#: The task that hands results to their requests, as Trio names it.
_PUMP = f"{Runtime.__module__}.{Runtime._pump.__qualname__}"  # noqa: SLF001 - its name only


@attrs.define(eq=False)
class _Life:
    """What is known of one request that was submitted."""

    request: EngineRequest
    #: Ids that the engine said, by choice.
    said: Counter[int] = attrs.field(factory=Counter)
    #: Choices that the engine ended itself, by the number of the result that said so.
    ended: dict[int, int] = attrs.field(factory=dict)
    #: Choices that it was told to end.
    dropped: set[int] = attrs.field(factory=set)
    failed: int | None = None
    aborts: int = 0
    #: Trio time since when it is paused.
    paused_s: float | None = None
    #: Whether it was paused for some time when it was aborted.
    stuck: bool = False

    def over(self) -> int | None:
        """The number of the result with which nothing of it was left in the engine, if so."""
        if self.failed is not None:
            return self.failed
        if len(self.ended.keys() | self.dropped) < self.request.n:
            return None
        return max(self.ended.values(), default=0)


@attrs.define(eq=False)
class CountingBackend:
    """A :class:`~triolet.runtime.backend.Backend` around another; counts what passes through.

    What breaks a rule is written to :attr:`broken`, and nothing is changed or raised.
    """

    inner: Backend
    #: Called after each result has gone to the runtime.
    on_step: Callable[[StepResult], None] = attrs.field(default=lambda _: None)
    broken: list[str] = attrs.field(factory=list, init=False)
    #: Whether the engine died.
    down: bool = attrs.field(default=False, init=False)
    #: How often each of the synchronous methods was called.
    calls: Counter[str] = attrs.field(factory=Counter, init=False)
    _lives: dict[RequestId, _Life] = attrs.field(factory=dict, init=False)
    _results: int = attrs.field(default=0, init=False)
    _steps: trio.MemorySendChannel[StepResult] | None = attrs.field(default=None, init=False)

    async def run(  # noqa: ASYNC128 - the backend within starts and checkpoints
        self,
        steps: trio.MemorySendChannel[StepResult],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See :meth:`triolet.runtime.backend.Backend.run`."""
        self._steps = steps
        counted: trio.MemorySendChannel[StepResult] = _CountedSteps(self, steps)  # type: ignore[assignment] # all of it that backends use
        try:
            await self.inner.run(counted, task_status=task_status)
        except Exception:
            self.down = True
            raise

    def submit(self, request: EngineRequest) -> None:
        """See :meth:`triolet.runtime.backend.Backend.submit`."""
        self.calls["submit"] += 1
        if request.id in self._lives:
            self.broken.append(f"{request.id} was submitted twice")
        self.inner.submit(request)
        self._lives[request.id] = _Life(request)

    def abort(self, request_id: RequestId) -> None:
        """See :meth:`triolet.runtime.backend.Backend.abort`."""
        self.calls["abort"] += 1
        life = self._lives.get(request_id)
        if life is None:
            self.broken.append(f"{request_id} was aborted and never submitted")
        else:
            life.aborts += 1
            now_s = trio.current_time()
            paused = life.paused_s is not None and life.paused_s < now_s
            life.stuck |= paused and life.over() is None
            if life.aborts > 1:
                self.broken.append(f"{request_id} was aborted {life.aborts} times")
            elif self._is_known(life.over(), life):
                self.broken.append(f"{request_id} was aborted after its end")
        late = self.inner.statistics().late_aborts
        self.inner.abort(request_id)
        held = life is not None and life.aborts == 1 and life.over() is None
        if held and self.inner.statistics().late_aborts > late and not self.down:
            self.broken.append(f"the engine had dropped {request_id} without a word")

    def end_choice(self, request_id: RequestId, choice: int) -> None:
        """See :meth:`triolet.runtime.backend.Backend.end_choice`."""
        self.calls["end_choice"] += 1
        life = self._lives.get(request_id)
        if life is None:
            self.broken.append(f"{request_id}: a choice was ended of what was never submitted")
        else:
            if life.aborts or choice in life.dropped:
                self.broken.append(f"{request_id}: choice {choice} was ended twice")
            elif self._is_known(life.ended.get(choice), life):
                self.broken.append(f"{request_id}: choice {choice} was ended after its end")
            life.dropped.add(choice)
        self.inner.end_choice(request_id, choice)

    def pause(self, request_id: RequestId) -> None:
        """See :meth:`triolet.runtime.backend.Backend.pause`."""
        self.calls["pause"] += 1
        if (life := self._lives.get(request_id)) is not None:
            life.paused_s = trio.current_time()
        self.inner.pause(request_id)

    def resume(self, request_id: RequestId) -> None:
        """See :meth:`triolet.runtime.backend.Backend.resume`."""
        self.calls["resume"] += 1
        if (life := self._lives.get(request_id)) is not None:
            life.paused_s = None
        self.inner.resume(request_id)

    def statistics(self) -> EngineStatistics:
        """See :meth:`triolet.runtime.backend.Backend.statistics`."""
        return self.inner.statistics()

    def healthy(self) -> bool:
        """See :meth:`triolet.runtime.backend.Backend.healthy`."""
        return self.inner.healthy()

    @property
    def submitted(self) -> tuple[EngineRequest, ...]:
        """Every request that it was given."""
        return tuple(life.request for life in self._lives.values())

    def request(self, request_id: RequestId) -> EngineRequest:
        """What was submitted under this id."""
        return self._lives[request_id].request

    def said(self, request_id: RequestId) -> int:
        """Output ids that the engine said of a request, over all its choices."""
        life = self._lives.get(request_id)
        return 0 if life is None else life.said.total()

    def is_paused(self, request_id: RequestId) -> bool:
        """Whether it was paused and not resumed since."""
        life = self._lives.get(request_id)
        return life is not None and life.paused_s is not None

    def was_stuck(self, request_id: RequestId) -> bool:
        """Whether it had been paused for some time when it was aborted."""
        life = self._lives.get(request_id)
        return life is not None and life.stuck

    def holds(self, request_id: RequestId) -> bool:
        """Whether it has neither been ended by the engine nor aborted."""
        life = self._lives.get(request_id)
        return life is not None and not life.aborts and life.over() is None

    def left(self) -> list[str]:
        """What is wrong when nothing more will come: requests that nobody ended."""
        if self.down:
            return []
        return [
            f"{request_id} was neither ended by the engine nor aborted"
            for request_id in self._lives
            if self.holds(request_id)
        ]

    def take(self, result: StepResult) -> None:
        """Note what a result says; it is on its way to the runtime."""
        self._results += 1
        named = {*result.first_scheduled, *(said.request_id for said in result.outputs)}
        named |= {failure.request_id for failure in result.failures}
        if unknown := named - self._lives.keys():
            self.broken.append(f"the engine spoke of {sorted(unknown)}, never submitted")
            return
        for output in result.outputs:
            life = self._lives[output.request_id]
            life.said[output.choice] += len(output.token_ids)
            if output.finish is not None:
                life.ended[output.choice] = self._results
        for failure in result.failures:
            self._lives[failure.request_id].failed = self._results

    def _is_known(self, result: int | None, life: _Life) -> bool:
        """Whether the runtime had read this result before it called."""
        if result is None or self._steps is None:
            return False
        under_way = self._steps.statistics().current_buffer_used
        request = life.request
        if not _in_pump():
            under_way += _RESULTS_UNDER_WAY
        elif request.n > 1 or base_id(request.id) != request.id:
            # A result is read output by output: the end of a sibling may stand further down.
            under_way += 1
        return result <= self._results - under_way


def _in_pump() -> bool:
    """Whether the caller is the task that hands results to their requests."""
    return trio.lowlevel.current_task().name == _PUMP


@attrs.frozen(eq=False)
class _CountedSteps:
    """The channel that a backend sends its results to, with an eye on them."""

    backend: CountingBackend
    steps: trio.MemorySendChannel[StepResult]

    async def send(self, result: StepResult) -> None:
        self.backend.take(result)
        await self.steps.send(result)
        self.backend.on_step(result)

    def close(self) -> None:
        self.steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _: type[BaseException] | None,
        __: BaseException | None,
        ___: TracebackType | None,
    ) -> None:
        self.close()


def base_id(request_id: RequestId) -> RequestId:
    """The id of a request whose prompts the engine knows as ``id:0``, ``id:1`` and so on."""
    return RequestId(request_id.partition(":")[0])
