"""The engine thread and Trio: commands go in, one message per step comes out.

Theory of operation. The engine runs in one thread for the life of the backend. Trio leaves
commands in an inbox and never waits for the thread. The thread empties the inbox between two
steps, so a command takes effect at the next step at the latest. With nothing to do the thread
waits *in Trio* for the inbox to fill. Each step's result goes through a bounded channel: where
the event loop lags, the thread waits there and generates nothing, so memory cannot grow.

The inbox is bounded without a limit of its own, by the live requests: it holds at most one word
about each, and one about each of its choices. An abort takes the place of all of them, and of a
submission that the thread has not seen, so a request that came and went within one step leaves
nothing behind.

A step cannot be interrupted, so nothing waits for one without a bound. To stop, because
it shall or because the watchdog saw its step stall, the thread is told so, woken from whatever
it waits for in Trio, and given a moment to finish its step. After that it is abandoned: it may
compute for as long as it likes, but it finds the word to stop before it says or stores anything,
and returns. Whoever ends the process asks :attr:`EngineThread.abandoned` how. A step that never
lets go of the GIL stops the event loop too and cannot be seen from inside; a supervisor's
watchdog can.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Protocol

import attrs
import trio

from triolet.core import EngineRequest, EngineStatistics, RequestId
from triolet.errors import EngineDownError
from triolet.runtime.stall import Watched, period_s

if TYPE_CHECKING:
    from triolet.core import StepResult

logger = logging.getLogger(__name__)

#: Seconds that a stop waits for the step in flight, which by then computes for nobody. With what
#: connections get for their last bytes it stays below the two in which a drained server exits.
LAST_STEP_S = 0.5
#: Seconds between two looks at a thread that was left behind, which has no event to wait for.
RETURN_POLL_S = 0.05


class StepEngine(Protocol):
    """What a thread can drive: :class:`triolet.engine.loop.Engine`, or a fake of it."""

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` would compute anything."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""

    def abort(self, request_id: RequestId) -> object:
        """Drop a request; a no-op for ids that are not held."""

    def end_choice(self, request_id: RequestId, choice: int) -> object:
        """Drop one choice of a request; a no-op for what is not held."""

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
    """Commands that wait for the next step. Delivered in the order of the fields."""

    submitted: dict[RequestId, EngineRequest] = attrs.field(factory=dict)
    #: True pauses, False resumes.
    paused: dict[RequestId, bool] = attrs.field(factory=dict)
    ended: dict[RequestId, set[int]] = attrs.field(factory=dict)
    aborted: dict[RequestId, None] = attrs.field(factory=dict)

    def abort(self, request_id: RequestId) -> None:
        """Take a request back, or have the engine drop it."""
        self.paused.pop(request_id, None)
        self.ended.pop(request_id, None)
        if self.submitted.pop(request_id, None) is None:
            self.aborted[request_id] = None

    def end_choice(self, request_id: RequestId, choice: int) -> None:
        """Have the engine drop one choice, unless it drops the whole request anyway."""
        if request_id not in self.aborted:
            self.ended.setdefault(request_id, set()).add(choice)

    def deliver(self, engine: StepEngine) -> None:
        """Hand everything over."""
        for request in self.submitted.values():
            engine.add(request)
        for request_id, paused in self.paused.items():
            (engine.pause if paused else engine.resume)(request_id)
        for request_id, choices in self.ended.items():
            for choice in sorted(choices):
                engine.end_choice(request_id, choice)
        for request_id in self.aborted:
            engine.abort(request_id)


@attrs.define(eq=False)
class EngineThread:
    """A :class:`~triolet.runtime.backend.Backend` that drives an engine in a thread of its own."""

    engine: StepEngine
    #: Seconds that one step may take before the engine counts as dead.
    stall_timeout_s: float = math.inf
    _inbox: Inbox = attrs.field(factory=Inbox, init=False)
    # Held for a few assignments only, never across a step or an await.
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _wake: trio.Event = attrs.field(factory=trio.Event, init=False)
    _statistics: EngineStatistics = attrs.field(factory=EngineStatistics, init=False)
    _running: bool = attrs.field(default=False, init=False)
    # Set by Trio, read by the thread: nobody listens to it any more.
    _stop: threading.Event = attrs.field(factory=threading.Event, init=False)
    # Written by the thread, read by Trio: the number of the step that it computes, if any, and
    # the thread's own number while it runs.
    _step: int | None = attrs.field(default=None, init=False)
    _ident: int | None = attrs.field(default=None, init=False)
    _left_behind: bool = attrs.field(default=False, init=False)
    _stall: EngineDownError | None = attrs.field(default=None, init=False)

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

    def end_choice(self, request_id: RequestId, choice: int) -> None:
        """See :meth:`triolet.runtime.backend.Backend.end_choice`."""
        with self._lock:
            self._inbox.end_choice(request_id, choice)
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
        """Whether the thread runs and is listened to."""
        return self._running

    @property
    def abandoned(self) -> bool:
        """Whether a stopped backend's thread still computes, so that the interpreter cannot exit.

        An interpreter that shuts down around native code aborts the process.
        """
        return self._left_behind and self._ident is not None

    async def wait_returned(self) -> None:
        """Wait, maybe for ever, until the thread of a stopped backend has come back."""
        while self.abandoned:  # noqa: ASYNC110 - a thread that nobody listens to sets no event
            await trio.sleep(RETURN_POLL_S)
        await trio.lowlevel.checkpoint()

    async def run(
        self,
        steps: trio.MemorySendChannel[StepResult],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See :meth:`triolet.runtime.backend.Backend.run`.

        Cancellation takes effect after the step in flight, but :data:`LAST_STEP_S` later at the
        latest: a kernel cannot be interrupted, only abandoned.

        Raises:
            EngineDownError: A step has taken longer than ``stall_timeout_s``.
        """
        self._running = True
        task_status.started()
        death: Exception | None = None
        # Shielded, with the deadline that _watch sets on its way out.
        thread = trio.CancelScope(shield=True)
        try:
            with steps:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch, thread, steps)
                    with thread:
                        try:
                            await trio.to_thread.run_sync(
                                self._drive,
                                steps,
                                thread_name="triolet-engine",
                                abandon_on_cancel=True,
                                # Its own slot: the engine must never wait for a file access.
                                limiter=trio.CapacityLimiter(1),
                            )
                        except Exception as error:  # noqa: BLE001 - raised below, out of the group
                            death = error
                    nursery.cancel_scope.cancel(reason="the thread has ended")
        finally:
            self._running = False
            self._left_behind = thread.cancelled_caught
        failure = death or self._stall
        if failure is not None:
            raise failure

    async def _watch(
        self, thread: trio.CancelScope, steps: trio.MemorySendChannel[StepResult]
    ) -> None:
        """Once a step stalls, or this is cancelled, stop the thread, and soon let go of it."""
        try:
            await self._wait_for_stall()
        finally:
            self._stop.set()
            # Whatever the thread waits for in Trio ends.
            self._wake.set()
            steps.close()
            thread.deadline = trio.current_time() + LAST_STEP_S

    async def _wait_for_stall(self) -> None:
        if self.stall_timeout_s == math.inf:
            await trio.sleep_forever()  # rather than wake up once a second for nothing
        period = period_s(self.stall_timeout_s)
        watched = Watched(trio.current_time())
        while True:
            await trio.sleep(period)
            watched = watched.look(trio.current_time(), self._step, period_s=period)
            if watched.stalled(self.stall_timeout_s):
                break
        self._stall = EngineDownError(
            f"One step of the engine took longer than {self.stall_timeout_s:g} s "
            "(--engine-stall-timeout), so the engine counts as dead."
        )
        logger.error("the engine stalls here:\n%s", self._stack())

    def _stack(self) -> str:
        frames = sys._current_frames()  # noqa: SLF001 - the only way to see another thread
        frame = frames.get(self._ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else "(it has just returned)"

    def _drive(self, steps: trio.MemorySendChannel[StepResult]) -> None:
        """The thread. What it calls Trio for ends when it shall stop."""
        self._ident = threading.get_ident()
        number = 0
        try:
            while not self._stop.is_set():
                self._step = number = number + 1
                with self._lock:
                    inbox, self._inbox = self._inbox, Inbox()
                inbox.deliver(self.engine)
                result = self.engine.step() if self.engine.has_work else None
                idle = result is None and not self.engine.has_work
                statistics = self.engine.statistics()
                # To wait for the event loop is not to stall.
                self._step = None
                if self._stop.is_set():
                    return
                self._statistics = statistics
                if result is not None:
                    trio.from_thread.run(self._hand_over, steps, result)
                elif idle:
                    trio.from_thread.run(self._wait_for_command)
        finally:
            self._step = self._ident = None

    async def _hand_over(
        self, steps: trio.MemorySendChannel[StepResult], result: StepResult
    ) -> None:
        try:
            await steps.send(result)
        except trio.ClosedResourceError:
            # Closed by _watch, so the thread is about to read that it shall stop.
            await trio.lowlevel.checkpoint()

    async def _wait_for_command(self) -> None:
        await self._wake.wait()
        # Reset before the inbox is read: a command posted from here on sets the new event.
        self._wake = trio.Event()
