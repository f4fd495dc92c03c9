"""The engine thread and Trio: commands go in, one message per step comes out.

Theory of operation. The engine runs in one thread for the life of the backend. Trio leaves
commands in an inbox and never waits for the thread. The thread empties the inbox between two
steps, so a command takes effect at the next step at the latest. With nothing to do the thread
waits *in Trio* for the inbox to fill, where cancellation reaches it; while busy it asks once
per step whether it was cancelled. Each step's result goes through a bounded channel: where the
event loop lags, the thread waits there and generates nothing, so memory cannot grow.

The inbox is bounded without a limit of its own, by the number of live requests: it holds at
most one word about each. An abort takes the place of a submission that the thread has not seen,
so a request that came and went within one step leaves nothing behind.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

import attrs
import trio

from triolet.core import EngineRequest, EngineStatistics, RequestId

if TYPE_CHECKING:
    from triolet.core import StepResult


class StepEngine(Protocol):
    """What a thread can drive: :class:`triolet.engine.loop.Engine`, or a fake of it."""

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` would compute anything."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""

    def abort(self, request_id: RequestId) -> object:
        """Drop a request; a no-op for ids that are not held."""

    def pause(self, request_id: RequestId) -> object:
        """Stop planning a request; a no-op for ids that are not held."""

    def resume(self, request_id: RequestId) -> object:
        """Plan a request again; a no-op for ids that are not held."""

    def step(self) -> StepResult | None:
        """Compute one step."""

    def statistics(self) -> EngineStatistics:
        """What the engine holds now."""


@attrs.define
class Inbox:
    """Commands that wait for the next step."""

    submitted: dict[RequestId, EngineRequest] = attrs.field(factory=dict)
    #: True pauses, False resumes.
    paused: dict[RequestId, bool] = attrs.field(factory=dict)
    aborted: dict[RequestId, None] = attrs.field(factory=dict)

    def abort(self, request_id: RequestId) -> None:
        """Take a request back, or have the engine drop it."""
        self.paused.pop(request_id, None)
        if self.submitted.pop(request_id, None) is None:
            self.aborted[request_id] = None

    def deliver(self, engine: StepEngine) -> None:
        """Hand everything over."""
        for request in self.submitted.values():
            engine.add(request)
        for request_id, paused in self.paused.items():
            (engine.pause if paused else engine.resume)(request_id)
        for request_id in self.aborted:
            engine.abort(request_id)


@attrs.define(eq=False)
class EngineThread:
    """A :class:`~triolet.runtime.backend.Backend` that drives an engine in a thread of its own."""

    engine: StepEngine
    _inbox: Inbox = attrs.field(factory=Inbox, init=False)
    # Held for a few assignments only, never across a step or an await.
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _wake: trio.Event = attrs.field(factory=trio.Event, init=False)
    _statistics: EngineStatistics = attrs.field(factory=EngineStatistics, init=False)
    _running: bool = attrs.field(default=False, init=False)

    def submit(self, request: EngineRequest) -> None:
        """See :meth:`triolet.runtime.backend.Backend.submit`."""
        with self._lock:
            self._inbox.submitted[request.id] = request
        self._wake.set()

    def abort(self, request_id: RequestId) -> None:
        """See :meth:`triolet.runtime.backend.Backend.abort`."""
        with self._lock:
            self._inbox.abort(request_id)
        self._wake.set()

    def pause(self, request_id: RequestId) -> None:
        """See :meth:`triolet.runtime.backend.Backend.pause`."""
        with self._lock:
            self._inbox.paused[request_id] = True
        self._wake.set()

    def resume(self, request_id: RequestId) -> None:
        """See :meth:`triolet.runtime.backend.Backend.resume`."""
        with self._lock:
            self._inbox.paused[request_id] = False
        self._wake.set()

    def statistics(self) -> EngineStatistics:
        """The snapshot taken after the last step or command."""
        return self._statistics

    def healthy(self) -> bool:
        """Whether the thread runs."""
        return self._running

    async def run(
        self,
        steps: trio.MemorySendChannel[StepResult],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See :meth:`triolet.runtime.backend.Backend.run`.

        Cancellation takes effect after the step in flight: a kernel cannot be interrupted.
        """
        self._running = True
        task_status.started()
        try:
            with steps:
                await trio.to_thread.run_sync(
                    self._drive,
                    steps,
                    thread_name="triolet-engine",
                    # Its own slot: the engine must never wait for somebody's file access.
                    limiter=trio.CapacityLimiter(1),
                )
        finally:
            self._running = False

    def _drive(self, steps: trio.MemorySendChannel[StepResult]) -> None:
        self._statistics = self.engine.statistics()
        while True:
            trio.from_thread.check_cancelled()
            with self._lock:
                inbox, self._inbox = self._inbox, Inbox()
            inbox.deliver(self.engine)
            result = self.engine.step() if self.engine.has_work else None
            self._statistics = self.engine.statistics()
            if result is not None:
                trio.from_thread.run(steps.send, result)
            elif not self.engine.has_work:
                trio.from_thread.run(self._wait_for_command)

    async def _wait_for_command(self) -> None:
        await self._wake.wait()
        # Reset before the inbox is read: a command posted from here on sets the new event.
        self._wake = trio.Event()
