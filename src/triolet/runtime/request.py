"""One request, one scope, one end.

Rules:

1. A request is one :class:`trio.CancelScope`. Its task sits inside the scope and does nothing
   but wait; it lives in the runtime's nursery, so a connection is only a reader of the log.
2. The first cause of an end wins. Later ones are nothing, at every layer.
3. Leaving the scope, however it is left, is synchronous: the engine is told to drop the request
   if it still holds it, the terminal event is appended, the record is written. No await, no
   shield, no garbage collector stands between a cancel and the abort.
4. Feeding never waits for a reader. A reader that lags pauses the request in the scheduler.
5. There are two deadlines and one scope: until the engine begins with the request, the earlier of
   both is the scope's, from then on the total one. What is late in the queue costs no step.
6. The states and moves are those of :mod:`triolet.runtime.state`.
7. To cancel a request takes the same time however many others are live.
8. One request's failure is its own, also where it happens while the request ends: what was pending
   may be lost then, but the terminal event, the abort and the record are not.
9. No error that is kept has a traceback: its frames would keep the request, and with it all that
   the request holds, until the garbage collector comes.
"""

from __future__ import annotations

import logging
import math
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
from triolet.output.events import Failed
from triolet.output.request import RequestOutput
from triolet.runtime.backend import Backend
from triolet.runtime.record import RequestRecord
from triolet.runtime.state import Move, State, after
from triolet.stream.hub import StreamHub
from triolet.stream.policy import Decision, Undelivered, decide

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
    #: Undelivered output at which the request is paused.
    _max_undelivered: Undelivered
    #: Called once, with the record, when the request has ended.
    _on_end: Callable[[RequestHandle, RequestRecord], None] = attrs.field(repr=False)
    _received_ns: int
    #: Who may ask for it by its id.
    owner: str = attrs.field(default="", repr=False)
    #: Trio time at which it ends if it has not ended, and if it is still in the queue.
    deadline_s: float = attrs.field(default=math.inf, repr=False)
    queue_deadline_s: float = attrs.field(default=math.inf, repr=False)
    state: State = attrs.field(default=State.QUEUED, init=False)
    scope: trio.CancelScope = attrs.field(init=False, repr=False)
    record: RequestRecord | None = attrs.field(default=None, init=False)
    _hub: StreamHub = attrs.field(factory=StreamHub, init=False, repr=False)
    _cause: CancelCause | None = attrs.field(default=None, init=False)
    _failure: TrioletError | None = attrs.field(default=None, init=False)
    _ended: trio.Event = attrs.field(factory=trio.Event, init=False, repr=False)
    _admitted_ns: int = attrs.field(factory=time.monotonic_ns, init=False)
    _first_scheduled_ns: int | None = attrs.field(default=None, init=False)
    _first_token_ns: int | None = attrs.field(default=None, init=False)
    _last_token_ns: int | None = attrs.field(default=None, init=False)
    #: The number of each prompt, by the engine's id.
    _prompts: dict[RequestId, int] = attrs.field(init=False, repr=False)

    @scope.default
    def _scope(self) -> trio.CancelScope:
        return trio.CancelScope(deadline=min(self.deadline_s, self.queue_deadline_s))

    @_prompts.default
    def _numbered(self) -> dict[RequestId, int]:
        return {engine_id: number for number, engine_id in enumerate(self.engine_ids)}

    async def run(self) -> None:
        """Hold the scope open until the request ends. The request's only task."""
        try:
            with self.scope:
                await self._ended.wait()
        finally:
            self._end()

    # What the client's side does.

    def cancel(self, cause: CancelCause) -> bool:
        """End the request from outside. The first cause wins; after an end this is a no-op.

        Returns:
            Whether this is what ends it.
        """
        if self.record is not None or self._cause is not None or self._output.ended:
            return False
        self._cause = cause
        self.scope.cancel(reason=cause.value)
        return True

    async def wait_ended(self) -> RequestRecord:
        """Wait for the end, which after :meth:`cancel` is a matter of the next pass of the loop."""
        await self._ended.wait()
        assert self.record is not None  # noqa: S101 - the event is set after it
        return self.record

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that needed no computing, as far as the engine has told."""
        return self._output.cached_tokens

    async def take(self) -> list[tuple[int, OutputEvent]]:
        """See :meth:`triolet.stream.hub.StreamHub.take`."""
        return await self._hub.take()

    def delivered(self, number: int) -> None:
        """The socket has accepted all events up to this number."""
        self._hub.log.delivered(number)
        self._balance()

    # What the engine's side does.

    def first_scheduled(self, now_ns: int) -> None:
        """The engine has begun to compute a prompt; only the first time counts."""
        # A scope that is cancelled stays so: what is too late by now was never begun with.
        if self.state is State.QUEUED and not self.scope.cancel_called:
            self.state = after(self.state, Move.START)
            self._first_scheduled_ns = now_ns
            self.scope.deadline = self.deadline_s

    def feed(self, tokens: TokenOutput, sampled_ns: int) -> None:
        """Turn one step's tokens into events. An exception here is this request's own."""
        if self._cause is not None or self.record is not None:
            return  # the first cause has won; the scope is on its way out
        # Whoever has output was begun with, also on a backend that did not say so.
        self.first_scheduled(sampled_ns)
        if self.state is State.QUEUED:
            return
        if tokens.token_ids:
            self._first_token_ns = self._first_token_ns or sampled_ns
            self._last_token_ns = sampled_ns
        try:
            self._hub.append(self._output.feed(tokens, self._prompts[tokens.request_id]))
        except Exception as error:
            logger.exception("request %s: output processing failed", self.id)
            self._failure = (
                error.with_traceback(None)
                if isinstance(error, OutputError)
                else OutputError("The output of this request could not be processed.")
            )
            self._close(self._failure)
        self._settle()

    def fail(self, error: TrioletError, engine_id: RequestId | None = None) -> None:
        """End the request because of an error that is not its client's. No-op after an end.

        Args:
            error: What its client is told.
            engine_id: The prompt that the engine cannot go on with, and holds no more.
        """
        if engine_id is not None:
            self._output.left_engine(self._prompts[engine_id])
        if self._cause is None and not self._output.ended:
            self._failure = error
            self._close(error)
            self._settle()

    def _close(self, error: TrioletError) -> None:
        """Say what is pending, then the failure: at least that. Raises nothing."""
        try:
            self._hub.append(self._output.fail(error))
        except Exception:
            logger.exception("request %s: its last output is lost", self.id)
        # Nothing for a log that has its end.
        self._hub.append([Failed(error, self._output.usage)])

    def _settle(self) -> None:
        """Do what follows from the newest output: aborts, the end, or a pause."""
        for prompt, choice in self._output.choices_to_end:
            self._output.choice_left_engine(prompt, choice)
            self._backend.end_choice(self.engine_ids[prompt], choice)
        self._abort(self._output.prompts_to_abort)
        if self._output.ended:
            self._end()
        else:
            self._balance()

    def _balance(self) -> None:
        """Pause or resume by what the reader has left undelivered."""
        if self.record is not None or self._cause is not None:
            return
        log = self._hub.log
        match decide(
            Undelivered(log.undelivered_bytes, log.undelivered_tokens),
            self._max_undelivered,
            paused=self.state is State.PAUSED,
        ):
            case Decision.PAUSE:
                self.state = after(self.state, Move.PAUSE)
                for prompt in self._output.prompts_in_engine:
                    self._backend.pause(self.engine_ids[prompt])
            case Decision.RESUME:
                self.state = after(self.state, Move.RESUME)
                for prompt in self._output.prompts_in_engine:
                    self._backend.resume(self.engine_ids[prompt])
            case Decision.KEEP:
                pass

    def _end(self) -> None:
        """Close the request. Runs once, synchronously, for every kind of end."""
        if self.record is not None:
            return
        if not self._output.ended:
            self._close(self._cancelled_error())
        self._abort(self._output.prompts_in_engine)
        self.state = after(self.state, self._last_move())
        cause = "" if self._cause is None else f":{self._cause.value}"
        self.record = RequestRecord(
            id=self.id,
            outcome=f"{self.state.value}{cause}",
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
            where = " while it waited in the queue" if self.state is State.QUEUED else ""
            return RequestTimeoutError(f"The deadline of this request passed{where}.")
        return CancelledRequestError(CAUSE_SENTENCES[self._cause], cause=self._cause.value)

    def _last_move(self) -> Move:
        if self._cause is not None:
            return Move.CANCEL
        return Move.FINISH if self._failure is None else Move.FAIL
