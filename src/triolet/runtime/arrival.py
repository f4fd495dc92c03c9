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
from triolet.errors import RequestTimeoutError, TrioletError
from triolet.output.events import Usage
from triolet.runtime.record import RequestRecord

if TYPE_CHECKING:
    from types import TracebackType

    from triolet.core import EngineRequest
    from triolet.runtime.lifecycle import TextOptions
    from triolet.runtime.request import RequestHandle


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

    def left(self, record: RequestRecord) -> None:
        """A place is free again."""


@attrs.define(eq=False)
class Arrival:
    """A place among the live requests. Used as a context manager; made by ``Runtime.arrive``."""

    _runtime: Places = attrs.field(repr=False)
    id: RequestId
    #: Trio time at which it arrived, and at which it is too late for it whatever it asks for.
    arrived_s: float
    deadline_s: float
    received_ns: int = attrs.field(factory=time.monotonic_ns, init=False)
    _open: bool = attrs.field(default=True, init=False)

    def admit(
        self, requests: tuple[EngineRequest, ...], text: TextOptions, *, timeout_s: float
    ) -> RequestHandle:
        """Become a live request, which takes over the place.

        Args:
            requests: What the engine gets: one for each prompt.
            text: What the output path gets.
            timeout_s: Seconds the request may take in all, counted from its arrival.

        Raises:
            CapacityError: The server has begun to drain, or the engine is down.
        """
        handle = self._runtime.admit(self, requests, text, timeout_s=timeout_s)
        self._open = False
        return handle

    def refuse(self, error: TrioletError) -> None:
        """Give the place back because of an error. A no-op once admitted."""
        timed_out = isinstance(error, RequestTimeoutError)
        self._leave(f"cancelled:{CancelCause.TIMEOUT.value}" if timed_out else "rejected")

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
            self._leave("failed")
        else:
            # Whoever is neither admitted nor refused has gone.
            self._leave(f"cancelled:{CancelCause.DISCONNECT.value}")

    def _leave(self, outcome: str) -> None:
        if self._open:
            self._open = False
            self._runtime.left(self.record(outcome))

    def record(self, outcome: str) -> RequestRecord:
        """The record of a request that never became one."""
        return RequestRecord(
            id=self.id,
            outcome=outcome,
            usage=Usage(0),
            received_ns=self.received_ns,
            ended_ns=time.monotonic_ns(),
        )


class ClientDisconnectedError(Exception):
    """The client left before its request was complete: nobody is there to answer."""
