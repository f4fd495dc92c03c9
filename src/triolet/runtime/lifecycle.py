"""The life of a server: starting, ready, draining, stopped.

::

    STARTING ──loaded──▶ READY ──drain()──▶ DRAINING ──all requests ended──▶ STOPPED
        │                  │ engine died                                       ▲
        └── load failed / drain() ─────────────────────────────────────────────┘

The engine's nursery encloses the requests' nursery, so requests always end before the engine
does, and what they abort is still there to hear it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import attrs
import trio

from triolet.core import CancelCause, ModelInfo, RequestId, StepResult
from triolet.errors import (
    CapacityError,
    EngineError,
    InvalidRequestError,
)
from triolet.output.request import RequestOutput
from triolet.runtime.admission import Admission
from triolet.runtime.arrival import Arrival
from triolet.runtime.phase import Phase, engine_down, refusal
from triolet.runtime.record import RequestRecord, write
from triolet.runtime.registry import Ended, Registry
from triolet.runtime.request import RequestHandle
from triolet.runtime.served import Served, TextOptions
from triolet.runtime.state import State
from triolet.stream.policy import Undelivered

if TYPE_CHECKING:
    from triolet.config import Config
    from triolet.core import EngineRequest
    from triolet.runtime.backend import Backend

__all__ = ["Phase", "Runtime", "Served", "TextOptions", "runtime_from"]

logger = logging.getLogger(__name__)

#: Engine steps that may wait for the event loop. Enough to ride out a slow pass of the loop,
#: few enough that a stalled loop stops the engine within moments.
STEP_CHANNEL_STEPS = 4


@attrs.define(eq=False)
class Runtime:
    """Owns the engine, the live requests and the phase."""

    _load: Callable[[], Awaitable[Served]] = attrs.field(repr=False)
    max_live_requests: int
    max_undelivered_bytes: int
    #: Seconds that one request may take in all; it may ask for less.
    max_request_timeout_s: float
    #: Seconds that running requests get once a drain has begun.
    drain_timeout_s: float
    #: Seconds that a request may wait for its first step of the engine.
    queue_timeout_s: float = math.inf
    #: Output tokens of one stream that its client has not taken.
    max_undelivered_tokens: int = 512
    #: Prompt tokens that may wait for the engine; ``None`` bounds the requests alone.
    max_queued_tokens: int | None = None
    #: Told of every request's end.
    on_record: Callable[[RequestRecord], None] = attrs.field(default=lambda _: None, repr=False)
    phase: Phase = attrs.field(default=Phase.STARTING, init=False)
    #: Why the server stopped, where it did not stop because it was asked to.
    failure: Exception | None = attrs.field(default=None, init=False)
    _served: Served | None = attrs.field(default=None, init=False)
    _requests: trio.Nursery | None = attrs.field(default=None, init=False, repr=False)
    #: By the engine's ids, one for each prompt.
    _handles: dict[RequestId, RequestHandle] = attrs.field(factory=dict, init=False, repr=False)
    #: By the clients' ids.
    _registry: Registry[RequestHandle] = attrs.field(
        factory=Registry[RequestHandle], init=False, repr=False
    )
    _admission: Admission = attrs.field(init=False)
    _draining: trio.Event = attrs.field(factory=trio.Event, init=False, repr=False)
    _hurry: trio.Event = attrs.field(factory=trio.Event, init=False, repr=False)
    _idle: trio.Event = attrs.field(factory=trio.Event, init=False, repr=False)
    _settled: trio.Event = attrs.field(factory=trio.Event, init=False, repr=False)
    _stopped: trio.Event = attrs.field(factory=trio.Event, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._admission = Admission(
            max_live=self.max_live_requests, max_queued_tokens=self.max_queued_tokens
        )

    # The life of the server.

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load, serve until drained, stop. Failures are kept in :attr:`failure`, not raised.

        Started at once: until the model is loaded, requests are refused with a reason.
        """
        task_status.started()
        try:
            self._served = await self._load_or_drain()
            if self._served is not None:
                await self._serve(self._served)
        finally:
            self.phase = Phase.STOPPED
            self._settled.set()
            self._stopped.set()

    def drain(self) -> None:
        """Take no more requests and stop when the running ones have ended. Again: cancel them."""
        if self._draining.is_set():
            self._hurry.set()
        self._draining.set()
        if self.phase is Phase.READY:
            self.phase = Phase.DRAINING

    async def wait_started(self) -> None:
        """Wait until the server is ready, or has stopped without ever having been."""
        await self._settled.wait()

    async def wait_stopped(self) -> None:
        """Wait until every request has ended and the engine has stopped."""
        await self._stopped.wait()

    async def _load_or_drain(self) -> Served | None:
        served: Served | None = None

        async def load() -> None:  # noqa: ASYNC910 - a load that fails at once may do without
            nonlocal served
            try:
                served = await self._load()
            except Exception as error:  # noqa: BLE001 - kept for the exit code, whatever it is
                self.failure = error
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(load)
            await self._draining.wait()
            nursery.cancel_scope.cancel(reason="drained while loading")
        return served

    async def _serve(self, served: Served) -> None:
        send, receive = trio.open_memory_channel[StepResult](STEP_CHANNEL_STEPS)
        async with trio.open_nursery() as engine:
            await engine.start(self._run_backend, served.backend, send)
            engine.start_soon(self._pump, receive)
            async with trio.open_nursery() as requests:
                self._requests = requests
                self.phase = Phase.READY
                self._settled.set()
                await self._draining.wait()
                self.phase = Phase.DRAINING
                await self._wait_for_requests()
                for handle in self._registry.live():
                    handle.cancel(CancelCause.SHUTDOWN)
            engine.cancel_scope.cancel(reason="drained")

    async def _wait_for_requests(self) -> None:
        """Until the last request ends, the drain timeout passes, or somebody is in a hurry."""
        if not self._handles:
            self._idle.set()

        async def hurry() -> None:
            await self._hurry.wait()
            nursery.cancel_scope.cancel()

        with trio.move_on_after(self.drain_timeout_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hurry)
                await self._idle.wait()
                nursery.cancel_scope.cancel()

    async def _run_backend(  # noqa: ASYNC128, ASYNC910 - the backend starts and checkpoints
        self,
        backend: Backend,
        steps: trio.MemorySendChannel[StepResult],
        *,
        task_status: trio.TaskStatus[None],
    ) -> None:
        try:
            await backend.run(steps, task_status=task_status)
        except Exception as error:
            logger.exception("the engine died")
            self.failure = error
            self._fail_all()
            self.drain()

    def _fail_all(self) -> None:
        for engine_id, handle in tuple(self._handles.items()):
            # An error for each: its traceback will hold what its own request held.
            handle.fail(engine_down(), engine_id)

    async def _pump(self, steps: trio.MemoryReceiveChannel[StepResult]) -> None:
        async for step in steps:
            self._deliver(step)

    def _deliver(self, step: StepResult) -> None:
        """Give a step's tokens to their requests. Synchronous: nobody sees half of a step."""
        now_s = trio.current_time()
        for request_id in step.first_scheduled:
            self._admission.started(now_s, request_id)
            if handle := self._handles.get(request_id):
                handle.first_scheduled(step.started_ns)
        for tokens in step.outputs:
            if handle := self._handles.get(tokens.request_id):
                handle.feed(tokens, step.sampled_ns)
        for failure in step.failures:
            if handle := self._handles.get(failure.request_id):
                handle.fail(EngineError(failure.message), failure.request_id)

    # What the server's routes ask for.

    @property
    def served(self) -> Served:
        """The loaded model.

        Raises:
            CapacityError: The server is loading, draining or down.
        """
        if self._served is None or self.phase is not Phase.READY:
            raise self.refusal()
        return self._served

    @property
    def model(self) -> ModelInfo | None:
        """The loaded model's facts, also while draining; ``None`` before it is loaded."""
        return None if self._served is None else self._served.info

    @property
    def healthy(self) -> bool:
        """Whether the process does what it should: a server that loads or drains is healthy."""
        if self.failure is not None:
            return False
        return self.phase is not Phase.READY or self.served.backend.healthy()

    def backend(self) -> Backend | None:
        """The backend once loaded, for its statistics."""
        return None if self._served is None else self._served.backend

    @property
    def live_requests(self) -> int:
        """Requests that have not ended, those still being read included."""
        return self._admission.live

    @property
    def queued_requests(self) -> int:
        """Prompts that wait for the engine to begin with them."""
        return self._admission.queued

    @property
    def queued_tokens(self) -> int:
        """Their tokens."""
        return self._admission.queued_tokens

    @property
    def paused_requests(self) -> int:
        """Requests whose reader lags. Counted when asked for."""
        return sum(handle.state is State.PAUSED for handle in self._registry.live())

    def share_places(self) -> None:
        """Keep a few places for keys that have none. Call it where there is more than one key."""
        self._admission.shared = True

    def arrive(
        self, request_id: RequestId, tenant: str = "", *, timeout_s: float = math.inf
    ) -> Arrival:
        """Take a place for a request of which nothing has been read yet.

        Args:
            request_id: What it is to be known by.
            tenant: Whose it is.
            timeout_s: Seconds that it may take in all, as far as is known by now.

        Raises:
            CapacityError: Loading, draining, down, or full.
        """
        now = trio.current_time()
        deadline_s = now + min(timeout_s, self.max_request_timeout_s)
        arrival = Arrival(self, request_id, tenant, arrived_s=now, deadline_s=deadline_s)
        try:
            self.served  # noqa: B018 - raises where there is none
            self._admission.enter(now, tenant)
        except CapacityError:
            write(arrival.turn_away(), self.on_record)
            raise
        return arrival

    def admit(
        self,
        arrival: Arrival,
        requests: tuple[EngineRequest, ...],
        text: TextOptions,
        *,
        timeout_s: float,
    ) -> RequestHandle:
        """See :meth:`triolet.runtime.arrival.Arrival.admit`. No await from start to end."""
        served = self.served
        assert self._requests is not None  # noqa: S101 - READY means the nursery is open
        if len(requests) > (most := self._admission.max_at_once):
            raise InvalidRequestError(
                f"This server takes {most} prompts at once, and the request has "
                f"{len(requests)}: send them apart.",
                param="prompt",
            )
        now_s = trio.current_time()
        handle = RequestHandle(
            id=arrival.id,
            engine_ids=tuple(request.id for request in requests),
            backend=served.backend,
            output=RequestOutput(
                vocabulary=served.tokenizer.vocabulary,
                prompt_tokens=tuple(len(request.prompt_ids) for request in requests),
                prompt_ids=tuple(request.prompt_ids for request in requests),
                n=requests[0].n,
                stops=text.stops,
                include_stop=text.include_stop,
                skip_special_tokens=text.skip_special_tokens,
                min_tokens=text.min_tokens,
            ),
            max_undelivered=Undelivered(self.max_undelivered_bytes, self.max_undelivered_tokens),
            on_end=self._request_ended,
            received_ns=arrival.received_ns,
            owner=arrival.tenant,
            deadline_s=min(arrival.deadline_s, arrival.arrived_s + timeout_s),
            queue_deadline_s=now_s + self.queue_timeout_s,
        )
        # Each further prompt is a request of its own to the engine, so it takes a place too.
        self._admission.wait(now_s, {r.id: len(r.prompt_ids) for r in requests}, arrival.tenant)
        self._submit(handle, requests, served.backend)
        self._registry.add(handle)
        self._requests.start_soon(handle.run, name=f"request {handle.id}")
        return handle

    def _submit(
        self, handle: RequestHandle, requests: tuple[EngineRequest, ...], backend: Backend
    ) -> None:
        try:
            for request in requests:
                self._handles[request.id] = handle
                backend.submit(request)
        except BaseException:
            # A bug in the backend; what it leaves behind must not take a place for ever.
            for engine_id in handle.engine_ids:
                if self._handles.pop(engine_id, None) is not None:
                    backend.abort(engine_id)
            self._admission.withdraw(trio.current_time(), handle.engine_ids, handle.owner)
            raise

    def find(self, request_id: RequestId, owner: str) -> RequestHandle | Ended | None:
        """See :meth:`triolet.runtime.registry.Registry.find`."""
        return self._registry.find(request_id, owner)

    def _request_ended(self, handle: RequestHandle, record: RequestRecord) -> None:
        for engine_id in handle.engine_ids:
            del self._handles[engine_id]
        if self._draining.is_set() and not self._handles:
            self._idle.set()
        self._registry.end(handle, record.outcome)
        self._admission.leave(trio.current_time(), handle.engine_ids, handle.owner)
        write(record, self.on_record)

    def left(self, arrival: Arrival, record: RequestRecord) -> None:
        """A request that was never admitted gives its place back."""
        self._admission.turn_back(trio.current_time(), arrival.tenant)
        write(record, self.on_record)

    def refusal(self) -> CapacityError:
        """Why no request is taken now."""
        return refusal(self.phase, failed=self.failure is not None)


def runtime_from(load: Callable[[], Awaitable[Served]], config: Config) -> Runtime:
    """A runtime with a configuration's limits that serves what ``load`` loads once it runs."""
    return Runtime(
        load,
        max_live_requests=config.max_num_seqs + config.max_num_queued_reqs,
        max_undelivered_bytes=config.max_stream_buffer,
        max_undelivered_tokens=config.max_stream_tokens,
        max_request_timeout_s=config.request_timeout,
        drain_timeout_s=config.drain_timeout,
        queue_timeout_s=config.queue_timeout or math.inf,
        max_queued_tokens=config.max_num_queued_tokens,
    )
