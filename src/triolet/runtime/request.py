"""One request, one scope, one end.

Rules:

1. A request is one :class:`trio.CancelScope`. Its task sits inside the scope and does nothing
   but wait; it lives in the runtime's nursery, so a connection is only a reader of the log.
2. The first cause of an end wins. Later ones are nothing, at every layer.
3. Leaving the scope, however it is left, is synchronous: the engine is told to drop the request
   if it still holds it, the terminal event is appended, the record is written. No await, no
   shield, no garbage collector stands between a cancel and the abort.
4. Feeding never waits for a reader. A reader that lags pauses the request in the scheduler.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import trio

from triolet.core import CancelCause, RequestId
from triolet.errors import (
    CancelledRequestError,
    OutputError,
    RequestTimeoutError,
    TrioletError,
)
from triolet.output.request import RequestOutput
from triolet.runtime.backend import Backend
from triolet.runtime.record import RequestRecord
from triolet.stream.hub import StreamHub
from triolet.stream.policy import Decision, decide

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triolet.core import TokenOutput
    from triolet.output.events import OutputEvent

logger = logging.getLogger(__name__)

#: What the client of a cancelled request is told, where its socket still takes it.
CAUSE_SENTENCES = {
    CancelCause.DISCONNECT: "The client went away.",
    CancelCause.CLIENT_CANCEL: "The request was cancelled.",
    CancelCause.SLOW_CLIENT: "The client read too slowly.",
    CancelCause.SHUTDOWN: "The server is shutting down; send the request again.",
}


@attrs.define(eq=False)
class RequestHandle:
    """The scope of one live request and the one cause of its end."""

    id: RequestId
    #: The engine's request for each prompt.
    engine_ids: tuple[RequestId, ...]
    _backend: Backend = attrs.field(repr=False)
    _output: RequestOutput = attrs.field(repr=False)
    #: Bytes of undelivered output at which the request is paused.
    _max_undelivered_bytes: int
    #: Called once, with the record, when the request has ended.
    _on_end: Callable[[RequestHandle, RequestRecord], None] = attrs.field(repr=False)
    _received_ns: int
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, repr=False)
    record: RequestRecord | None = attrs.field(default=None, init=False)
    _hub: StreamHub = attrs.field(factory=StreamHub, init=False, repr=False)
    _cause: CancelCause | None = attrs.field(default=None, init=False)
    _failure: TrioletError | None = attrs.field(default=None, init=False)
    _paused: bool = attrs.field(default=False, init=False)
    _ended: trio.Event = attrs.field(factory=trio.Event, init=False, repr=False)
    _admitted_ns: int = attrs.field(factory=time.monotonic_ns, init=False)
    _first_scheduled_ns: int | None = attrs.field(default=None, init=False)
    _first_token_ns: int | None = attrs.field(default=None, init=False)
    _last_token_ns: int | None = attrs.field(default=None, init=False)

    async def run(self) -> None:
        """Hold the scope open until the request ends. The request's only task."""
        try:
            with self.scope:
                await self._ended.wait()
        finally:
            self._end()

    # What the client's side does.

    def cancel(self, cause: CancelCause) -> None:
        """End the request from outside. The first cause wins; after an end this is a no-op."""
        if self.record is None and self._cause is None and not self._output.ended:
            self._cause = cause
            self.scope.cancel(reason=cause.value)

    async def take(self) -> list[tuple[int, OutputEvent]]:
        """See :meth:`triolet.stream.hub.StreamHub.take`."""
        return await self._hub.take()

    def delivered(self, number: int) -> None:
        """The socket has accepted all events up to this number."""
        self._hub.log.delivered(number)
        self._balance()

    # What the engine's side does.

    def first_scheduled(self, now_ns: int) -> None:
        """The engine has begun to compute the prompt."""
        if self._first_scheduled_ns is None:
            self._first_scheduled_ns = now_ns

    def feed(self, tokens: TokenOutput, sampled_ns: int) -> None:
        """Turn one step's tokens into events. An exception here is this request's own."""
        if self._cause is not None or self.record is not None:
            return  # the first cause has won; the scope is on its way out
        if tokens.token_ids:
            self._first_token_ns = self._first_token_ns or sampled_ns
            self._last_token_ns = sampled_ns
        try:
            events = self._output.feed(tokens, self.engine_ids.index(tokens.request_id))
        except Exception as error:
            logger.exception("request %s: output processing failed", self.id)
            self._failure = (
                error
                if isinstance(error, OutputError)
                else OutputError("The output of this request could not be processed.")
            )
            events = self._output.fail(self._failure)
        self._append(events)

    def fail(self, error: TrioletError, engine_id: RequestId) -> None:
        """The engine cannot go on with one of the prompts, and holds it no more."""
        self._output.left_engine(self.engine_ids.index(engine_id))
        if self._cause is None and not self._output.ended:
            self._failure = error
            self._append(self._output.fail(error))

    def _append(self, events: Iterable[OutputEvent]) -> None:
        self._hub.append(events)
        self._abort(self._output.prompts_to_abort)
        if self._output.ended:
            self._end()
        else:
            self._balance()

    def _balance(self) -> None:
        """Pause or resume by what the reader has left undelivered."""
        if self.record is not None:
            return
        match decide(
            undelivered_bytes=self._hub.log.undelivered_bytes,
            paused=self._paused,
            limit_bytes=self._max_undelivered_bytes,
        ):
            case Decision.PAUSE:
                self._paused = True
                for prompt in self._output.prompts_in_engine:
                    self._backend.pause(self.engine_ids[prompt])
            case Decision.RESUME:
                self._paused = False
                for prompt in self._output.prompts_in_engine:
                    self._backend.resume(self.engine_ids[prompt])
            case Decision.KEEP:
                pass

    def _end(self) -> None:
        """Close the request. Runs once, synchronously, for every kind of end."""
        if self.record is not None:
            return
        if not self._output.ended:
            self._hub.append(self._output.fail(self._cancelled_error()))
        self._abort(self._output.prompts_in_engine)
        self.record = RequestRecord(
            id=self.id,
            outcome=self._outcome(),
            usage=self._output.usage,
            received_ns=self._received_ns,
            admitted_ns=self._admitted_ns,
            ended_ns=time.monotonic_ns(),
            first_scheduled_ns=self._first_scheduled_ns,
            first_token_ns=self._first_token_ns,
            last_token_ns=self._last_token_ns,
        )
        self._ended.set()
        self._on_end(self, self.record)

    def _abort(self, prompts: Iterable[int]) -> None:
        for prompt in prompts:
            self._output.left_engine(prompt)
            self._backend.abort(self.engine_ids[prompt])

    def _cancelled_error(self) -> TrioletError:
        if self._cause is None:
            # Nobody gave a cause: the scope's own deadline, or the runtime's nursery going down.
            passed = trio.current_time() >= self.scope.deadline
            self._cause = CancelCause.TIMEOUT if passed else CancelCause.SHUTDOWN
        if self._cause is CancelCause.TIMEOUT:
            return RequestTimeoutError("The deadline of this request passed.")
        return CancelledRequestError(CAUSE_SENTENCES[self._cause], cause=self._cause.value)

    def _outcome(self) -> str:
        if self._cause is not None:
            return f"cancelled:{self._cause.value}"
        return "finished" if self._failure is None else "failed"
