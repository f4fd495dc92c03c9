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
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TYPE_CHECKING

import attrs
import trio

from triolet.core import CancelCause, ModelInfo, RequestId, StepResult
from triolet.errors import (
    CapacityError,
    DrainingError,
    EngineDownError,
    EngineError,
    InvalidRequestError,
    NotReadyError,
)
from triolet.observe.logs import REQUEST_LOGGER
from triolet.output.request import RequestOutput
from triolet.prompt.tokenizer import Tokenizer
from triolet.runtime.admission import Admission
from triolet.runtime.arrival import Arrival
from triolet.runtime.backend import Backend
from triolet.runtime.record import RequestRecord
from triolet.runtime.request import RequestHandle

if TYPE_CHECKING:
    from triolet.core import EngineRequest

logger = logging.getLogger(__name__)
request_logger = logging.getLogger(REQUEST_LOGGER)

#: Engine steps that may wait for the event loop. Enough to ride out a slow pass of the loop,
#: few enough that a stalled loop stops the engine within moments.
STEP_CHANNEL_STEPS = 4
#: What a client is told to wait while the model loads; loads take seconds to minutes.
LOADING_RETRY_AFTER_S = 5.0
#: A drained server, or one whose engine died, is usually replaced by another within this time.
DRAINING_RETRY_AFTER_S = 5.0


class Phase(StrEnum):
    """Where the server is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


@attrs.frozen
class Served:
    """A loaded model: what computes it and what reads and writes its text."""

    info: ModelInfo
    tokenizer: Tokenizer
    backend: Backend
    #: Bytes of the longest token: what one of the context's tokens can stand for at most.
    longest_token_bytes: int = attrs.field(init=False)

    @longest_token_bytes.default
    def _longest(self) -> int:
        return max(map(len, filter(None, self.tokenizer.vocabulary.token_bytes)), default=1)


@attrs.frozen
class TextOptions:
    """What shapes a request's text and is of no concern to the engine."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    #: Output tokens that a choice has before a stop string can end it.
    min_tokens: int = 0


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
    #: Told of every request's end.
    on_record: Callable[[RequestRecord], None] = attrs.field(default=lambda _: None, repr=False)
    phase: Phase = attrs.field(default=Phase.STARTING, init=False)
    #: Why the server stopped, where it did not stop because it was asked to.
    failure: Exception | None = attrs.field(default=None, init=False)
    _served: Served | None = attrs.field(default=None, init=False)
    _requests: trio.Nursery | None = attrs.field(default=None, init=False, repr=False)
    _handles: dict[RequestId, RequestHandle] = attrs.field(factory=dict, init=False, repr=False)
    _admission: Admission = attrs.field(init=False)
    _draining: trio.Event = attrs.field(factory=trio.Event, init=False, repr=False)
    _hurry: trio.Event = attrs.field(factory=trio.Event, init=False, repr=False)
    _idle: trio.Event = attrs.field(factory=trio.Event, init=False, repr=False)
    _settled: trio.Event = attrs.field(factory=trio.Event, init=False, repr=False)
    _stopped: trio.Event = attrs.field(factory=trio.Event, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._admission = Admission(max_live=self.max_live_requests)

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
                for handle in tuple(self._handles.values()):
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
            down = _engine_down()
            for engine_id, handle in tuple(self._handles.items()):
                handle.fail(down, engine_id)
            self.drain()

    async def _pump(self, steps: trio.MemoryReceiveChannel[StepResult]) -> None:
        """Give each step's tokens to their requests, in one synchronous pass per step."""
        async for step in steps:
            for request_id in step.first_scheduled:
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

    def arrive(self, request_id: RequestId) -> Arrival:
        """Take a place for a request of which nothing has been read yet.

        Raises:
            CapacityError: Loading, draining, down, or full.
        """
        now = trio.current_time()
        arrival = Arrival(
            self, request_id, arrived_s=now, deadline_s=now + self.max_request_timeout_s
        )
        try:
            self.served  # noqa: B018 - raises where there is none
            self._admission.enter(now)
        except CapacityError:
            self._write(arrival.record("rejected"))
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
        handle = RequestHandle(
            id=RequestId(requests[0].id.removesuffix(":0")),
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
            max_undelivered_bytes=self.max_undelivered_bytes,
            on_end=self._request_ended,
            received_ns=arrival.received_ns,
        )
        handle.scope.deadline = min(arrival.deadline_s, arrival.arrived_s + timeout_s)
        if len(requests) > self.max_live_requests:
            raise InvalidRequestError(
                f"This server takes {self.max_live_requests} prompts at once, and the request has "
                f"{len(requests)}: send them apart.",
                param="prompt",
            )
        # Each further prompt is a request of its own to the engine, so it takes a place too.
        self._admission.enter(trio.current_time(), len(requests) - 1)
        for request in requests:
            served.backend.submit(request)
            self._handles[request.id] = handle
        self._requests.start_soon(handle.run, name=f"request {handle.id}")
        return handle

    def _request_ended(self, handle: RequestHandle, record: RequestRecord) -> None:
        for engine_id in handle.engine_ids:
            del self._handles[engine_id]
        if self._draining.is_set() and not self._handles:
            self._idle.set()
        self.left(record, places=len(handle.engine_ids))

    def left(self, record: RequestRecord, *, places: int = 1) -> None:
        """A request, live or not yet, gives its place back, or one for each of its prompts."""
        self._admission.leave(trio.current_time(), places)
        self._write(record)

    def _write(self, record: RequestRecord) -> None:
        request_logger.info(
            "%s %s: %d prompt tokens, %d output tokens, %.3f s",
            record.id,
            record.outcome,
            record.usage.prompt_tokens,
            record.usage.output_tokens,
            (record.ended_ns - record.received_ns) / 1e9,
        )
        try:
            self.on_record(record)
        except Exception:
            # Whoever keeps the books must not end other people's requests.
            logger.exception("the record of %s could not be written", record.id)

    def refusal(self) -> CapacityError:
        """Why no request is taken now."""
        if self.failure is not None:
            return _engine_down()
        if self.phase is Phase.STARTING:
            return NotReadyError(
                "The model is still loading; try again after the time in Retry-After.",
                retry_after_s=LOADING_RETRY_AFTER_S,
            )
        return DrainingError(
            "The server is shutting down and takes no new requests.",
            retry_after_s=DRAINING_RETRY_AFTER_S,
        )


def _engine_down() -> EngineDownError:
    return EngineDownError(
        "The engine has stopped; this server will restart.", retry_after_s=DRAINING_RETRY_AFTER_S
    )
