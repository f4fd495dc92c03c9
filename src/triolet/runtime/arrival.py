"""A request before it is one: it has a place and a deadline, and not yet a prompt.

Reading a body and tokenizing a prompt take memory and time, so they are bounded like the
generation that follows: whoever arrives takes a place first, and gives it back exactly once,
to the live request that it becomes or to nobody.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, Self

import attrs

from triolet.core import CancelCause, RequestId
from triolet.errors import CancelledRequestError, TrioletError
from triolet.output.events import Usage
from triolet.runtime.record import RequestRecord
from triolet.runtime.state import Move, State, after

if TYPE_CHECKING:
    from types import TracebackType

    from triolet.core import EngineRequest
    from triolet.runtime.request import RequestHandle
    from triolet.runtime.served import TextOptions


class Places(Protocol):
    """Who gives out places: :class:`triolet.runtime.lifecycle.Runtime`."""

    def admit(
        self,
        arrival: Arrival,
        requests: tuple[EngineRequest, ...],
        text: TextOptions,
        *,
        timeout_s: float,
    ) -> RequestHandle:
        """Make a live request of an arrival."""

    def left(self, arrival: Arrival, record: RequestRecord) -> None:
        """The place of an arrival is free again."""


@attrs.define(eq=False)
class Arrival:
    """A place among the live requests. Used as a context manager; made by ``Runtime.arrive``."""

    _runtime: Places = attrs.field(repr=False)
    id: RequestId
    #: Whose it is.
    tenant: str = attrs.field(repr=False)
    #: Trio time at which it arrived, and at which it is too late for it whatever it asks for.
    arrived_s: float
    deadline_s: float
    received_ns: int = attrs.field(factory=time.monotonic_ns, init=False)
    state: State = attrs.field(default=State.RECEIVED, init=False)

    def admit(
        self,
        requests: tuple[EngineRequest, ...],
        text: TextOptions,
        *,
        timeout_s: float,
    ) -> RequestHandle:
        """Become a live request, which takes over the place.

        Args:
            requests: What the engine gets: one for each prompt.
            text: What the output path gets.
            timeout_s: Seconds the request may take in all, counted from its arrival.

        Raises:
            CapacityError: The server has begun to drain, or the engine is down, or the queue
                is full.
        """
        handle = self._runtime.admit(self, requests, text, timeout_s=timeout_s)
        self.state = after(self.state, Move.ADMIT)
        return handle

    def refuse(self, error: TrioletError) -> None:
        """Give the place back because of an error. A no-op once admitted."""
        if isinstance(error, CancelledRequestError):
            self._leave(Move.CANCEL, error.code)
        else:
            self._leave(Move.REFUSE)

    def turn_away(self) -> RequestRecord:
        """The record of a request that got no place, so that there is none to give back."""
        self.state = after(self.state, Move.REFUSE)
        return self._record(self.state.value)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _: type[BaseException] | None,
        error: BaseException | None,
        __: TracebackType | None,
    ) -> None:
        if isinstance(error, TrioletError):
            self.refuse(error)
        elif isinstance(error, Exception) and not isinstance(error, ClientDisconnectedError):
            self._leave(Move.FAIL)
        else:
            # Whoever is neither admitted nor refused has gone.
            self._leave(Move.CANCEL, CancelCause.DISCONNECT.value)

    def _leave(self, move: Move, cause: str | None = None) -> None:
        if self.state is State.RECEIVED:
            self.state = after(self.state, move)
            outcome = self.state.value if cause is None else f"{self.state.value}:{cause}"
            self._runtime.left(self, self._record(outcome))

    def _record(self, outcome: str) -> RequestRecord:
        return RequestRecord(
            id=self.id,
            outcome=outcome,
            usage=Usage(0),
            received_ns=self.received_ns,
            ended_ns=time.monotonic_ns(),
        )


class ClientDisconnectedError(Exception):
    """The client left before its request was complete: nobody is there to answer."""
