"""Bytes in, events and a verdict out: the pure half of a stream's reader.

- A stream has one end: ``done`` after ``[DONE]``, ``error`` after an error event, ``truncated``
  where the bytes end with neither, be it by a body that is complete or by one that is cut off
  (docs/reference/event-stream.md says what of it a Triolet server promises).
- What comes after the end is not read.
- Events and verdict depend on the bytes and never on how they were cut; only the receive times
  and the numbers of the reads do.
- Some servers never send ``[DONE]``. Theirs are ``truncated`` too, but :attr:`Outcome.finished`
  tells whether every choice had a finish reason and the body was complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import attrs

from triolet.client.chunks import Delta, TokenCounts, read_deltas, read_usage
from triolet.client.errors import (
    BrokenStreamError,
    Fault,
    StreamCutError,
    StreamFailedError,
    read_fault,
    read_json,
)
from triolet.wire.sse import EventTooLargeError, SseDecoder, SseEvent

DONE_DATA = "[DONE]"

_NOTHING: Mapping[str, object] = MappingProxyType({})


class Ending(StrEnum):
    """How a stream ended. A closed set."""

    DONE = "done"
    ERROR = "error"
    TRUNCATED = "truncated"


@attrs.frozen
class Instant:
    """One moment on two clocks."""

    #: Seconds of Trio's clock: what deadlines are made of, virtual in tests.
    trio_s: float
    #: ``time.monotonic_ns``: the clock that a server on the same machine stamps with.
    monotonic_ns: int


@attrs.frozen
class StreamEvent:
    """One event, what it says, and when it came."""

    #: From 1, comments not counted.
    number: int
    raw: SseEvent
    #: When the read that completed it returned.
    at: Instant
    #: Number of that read, from 1.
    read: int
    #: The event's JSON object; empty where its data is none.
    data: Mapping[str, object] = attrs.field(default=_NOTHING, repr=False)
    deltas: tuple[Delta, ...] = ()
    usage: TokenCounts | None = None

    @property
    def text(self) -> str:
        """The text that it adds, of all choices."""
        return "".join(delta.text for delta in self.deltas)

    @property
    def finish_reason(self) -> str | None:
        """The first finish reason in it."""
        return next((d.finish_reason for d in self.deltas if d.finish_reason), None)

    @property
    def visible(self) -> bool:
        """Whether it shows at least one token."""
        return any(delta.visible for delta in self.deltas)


@attrs.frozen
class Outcome:
    """The verdict on a stream that has ended."""

    ending: Ending
    #: What the error event said; with :attr:`Ending.ERROR`, and only with it.
    fault: Fault | None = None
    #: Why it counts as truncated.
    detail: str = ""
    #: Whether every choice that spoke was given a finish reason, and the body was complete.
    finished: bool = False

    def failure(self) -> BrokenStreamError | None:
        """The error to raise, or ``None`` for a stream that is done."""
        if self.fault is not None:
            return StreamFailedError(self.fault)
        if self.ending is Ending.TRUNCATED:
            return StreamCutError(f"The stream was cut: {self.detail}.")
        return None


@attrs.define(eq=False)
class StreamClassifier:
    """Reads one stream. Holds one event and a few numbers, whatever the stream's length."""

    #: ``None`` while the stream goes on.
    outcome: Outcome | None = attrs.field(default=None, init=False)
    #: The last usage that was reported.
    usage: TokenCounts | None = attrs.field(default=None, init=False)
    #: The ``id`` of the first chunk that had one.
    response_id: str | None = attrs.field(default=None, init=False)
    #: Finish reasons by choice.
    finish_reasons: dict[int, str] = attrs.field(factory=dict, init=False)
    events: int = attrs.field(default=0, init=False)
    #: Events whose data is no JSON object.
    unreadable: int = attrs.field(default=0, init=False)
    reads: int = attrs.field(default=0, init=False)
    bytes_read: int = attrs.field(default=0, init=False)
    _decoder: SseDecoder = attrs.field(factory=SseDecoder, init=False, repr=False)
    _choices: set[int] = attrs.field(factory=set, init=False)

    @property
    def comments(self) -> int:
        """Comment lines so far: keep-alives."""
        return self._decoder.comments

    def feed(self, piece: bytes, at: Instant) -> list[StreamEvent]:
        """Take one read and return the events that it completes, up to the stream's end."""
        if self.outcome is not None:
            return []
        self.reads += 1
        self.bytes_read += len(piece)
        found: list[StreamEvent] = []
        try:
            decoded = self._decoder.feed(piece)
        except EventTooLargeError as error:
            self.outcome = Outcome(Ending.TRUNCATED, detail=error.message.rstrip("."))
            return found
        for event in decoded:
            taken = self._take(event, at)
            if taken is None:
                break
            found.append(taken)
        return found

    def end(self) -> Outcome:
        """Take the end of a complete body."""
        if self.outcome is None:
            cut_event = self._decoder.finish()
            whole = not cut_event and bool(self._choices)
            self.outcome = Outcome(
                Ending.TRUNCATED,
                detail="the body ended inside an event"
                if cut_event
                else "the body ended without [DONE]",
                finished=whole and self._choices <= self.finish_reasons.keys(),
            )
        return self.outcome

    def cut(self, why: str) -> Outcome:
        """Take the end of a body that was cut off; ``why`` goes on after "The stream was cut:"."""
        if self.outcome is None:
            self.outcome = Outcome(Ending.TRUNCATED, detail=why)
        return self.outcome

    def _take(self, event: SseEvent, at: Instant) -> StreamEvent | None:
        """Take one event; ``None`` if it ended the stream."""
        # Some servers write more behind it, or no space before it.
        if event.data.lstrip().startswith(DONE_DATA):
            self.outcome = Outcome(Ending.DONE, finished=True)
            return None
        data = _object(event.data)
        fault = read_fault(data)
        if fault is None and event.type == "error":
            fault = Fault(str(data.get("message") or event.data or "The server gave no reason."))
        if fault is not None:
            self.outcome = Outcome(Ending.ERROR, fault=fault)
            return None
        self.events += 1
        self.unreadable += not data
        return self._read(event, data, at)

    def _read(self, raw: SseEvent, data: Mapping[str, object], at: Instant) -> StreamEvent:
        deltas, usage = read_deltas(data), read_usage(data)
        for delta in deltas:
            self._choices.add(delta.choice)
            if delta.finish_reason is not None:
                self.finish_reasons[delta.choice] = delta.finish_reason
        if usage is not None:
            self.usage = usage
        named = data.get("id")
        if self.response_id is None and isinstance(named, str) and named:
            self.response_id = named
        return StreamEvent(self.events, raw, at, self.reads, data, deltas, usage)


def _object(text: str) -> Mapping[str, object]:
    try:
        value = read_json(text)
    except (ValueError, RecursionError):
        return _NOTHING
    return value if isinstance(value, dict) else _NOTHING
