"""The log between the engine and the one who reads it out to the client.

The engine's side appends and never waits; the reader takes when it can. Between the two an
event is *pending*, then *in flight* (taken, but not yet accepted by the socket), then gone.

Rules:

1. Events are numbered from 1 without gaps, in the order in which they are taken.
2. While the newest pending event of a choice is a text delta, a further delta of that choice
   joins it, under its number: text, ids and logprobs are joined, nothing is lost. An event in
   flight is never touched, for the reader may have written it already.
3. So what is pending is bounded in number: per prompt its scores, per choice one delta and its
   finish, and the end.
   It is bounded in bytes and in tokens by :mod:`triolet.stream.policy`, which pauses the engine
   at the bound; what is appended above it is what was under way before the pause took effect. The
   scores of a prompt come at once and are never split: admission has to bound them.
4. In flight still counts as undelivered: a reader stuck in a write has delivered nothing.
5. ``Completed`` or ``Failed`` ends the log. What is appended after it is dropped: the first
   end of a request wins.

Cost model, in bytes: the UTF-8 length of the text, 8 for each token id,
:data:`LOGPROB_COST_BYTES` for each logprob and :data:`TOP_COST_BYTES` for each entry of its
``top``, and :data:`EVENT_COST_BYTES` for each event. Text and ids of deltas that joined are stored
just so (one byte array, one array of 64-bit integers), hence the figure is true for a request
whose reader never comes back. What is in flight is an ordinary event again, whose ids are
objects of their own: at worst five times their figure, for one batch. Logprobs stay the objects
that the engine made, pending and in flight, and are charged as such. Arrays would take an
eighth, but the reader turns them into objects and then into JSON as large, and that counts too.
"""

from __future__ import annotations

from array import array
from collections import deque

import attrs

from triolet.core import TokenLogprobs
from triolet.output.events import ChoiceFinished, OutputEvent, PromptScored, TextDelta

#: What an event costs besides text, ids and logprobs: its objects and our bookkeeping, rounded up
#: from the 660 bytes that tracemalloc finds on CPython 3.11.
EVENT_COST_BYTES = 672
#: A logprob with its numbers and its place in a list, from tracemalloc (176 and 2,559 bytes with
#: a top of 0 and 20).
LOGPROB_COST_BYTES = 176
#: One entry of its top: a pair, its numbers, its place in the tuple.
TOP_COST_BYTES = 120
_ID_COST_BYTES = 8


def _logprobs_cost_bytes(logprobs: tuple[TokenLogprobs, ...]) -> int:
    return sum(LOGPROB_COST_BYTES + TOP_COST_BYTES * len(scored.top) for scored in logprobs)


@attrs.define(eq=False)
class _Entry:
    """A numbered event; further deltas wait beside it in compact form until it is taken."""

    seq: int
    event: OutputEvent
    cost_bytes: int
    tokens: int
    joined_text: bytearray = attrs.field(factory=bytearray)
    joined_ids: array[int] = attrs.field(factory=lambda: array("q"))
    joined_logprobs: list[TokenLogprobs] = attrs.field(factory=list)

    def whole(self) -> OutputEvent:
        """The event with all that joined it."""
        event = self.event
        if isinstance(event, TextDelta) and (self.joined_text or self.joined_ids):
            event = TextDelta(
                event.choice,
                event.text + self.joined_text.decode(),
                event.token_ids + tuple(self.joined_ids),
                event.logprobs + tuple(self.joined_logprobs),
            )
        return event


@attrs.define(eq=False)
class StreamLog:
    """The undelivered events of one request."""

    #: Whether the terminal event was appended; it may still be undelivered.
    ended: bool = attrs.field(init=False, default=False)
    #: Cost of what is pending or in flight, by the model above.
    undelivered_bytes: int = attrs.field(init=False, default=0)
    #: Output tokens that are pending or in flight.
    undelivered_tokens: int = attrs.field(init=False, default=0)
    #: The most that ``undelivered_bytes`` has been.
    peak_bytes: int = attrs.field(init=False, default=0)
    _last_seq: int = attrs.field(init=False, default=0)
    _pending: deque[_Entry] = attrs.field(init=False, factory=deque)
    #: Number, cost and tokens; keeping the event here as well is what resuming would add.
    _in_flight: deque[tuple[int, int, int]] = attrs.field(init=False, factory=deque)
    #: Per choice, the pending delta that a further one joins.
    _open: dict[int, _Entry] = attrs.field(init=False, factory=dict)

    def append(self, event: OutputEvent) -> None:
        """Take what the request says next; nothing after its end."""
        if self.ended:
            return
        if isinstance(event, TextDelta):
            self._append_delta(event)
            return
        if isinstance(event, PromptScored):
            self._number(event, EVENT_COST_BYTES + _logprobs_cost_bytes(event.logprobs))
            return
        self._number(event, EVENT_COST_BYTES)
        if isinstance(event, ChoiceFinished):
            self._open.pop(event.choice, None)
        else:
            self.ended = True

    def _append_delta(self, delta: TextDelta) -> None:
        text = delta.text.encode()
        cost_bytes = (
            len(text) + _ID_COST_BYTES * len(delta.token_ids) + _logprobs_cost_bytes(delta.logprobs)
        )
        entry = self._open.get(delta.choice)
        if entry is None:
            cost_bytes += EVENT_COST_BYTES
            self._open[delta.choice] = self._number(delta, cost_bytes, len(delta.token_ids))
            return
        entry.joined_text += text
        entry.joined_ids.extend(delta.token_ids)
        entry.joined_logprobs.extend(delta.logprobs)
        entry.cost_bytes += cost_bytes
        entry.tokens += len(delta.token_ids)
        self._count(cost_bytes, len(delta.token_ids))

    def _number(self, event: OutputEvent, cost_bytes: int, tokens: int = 0) -> _Entry:
        self._last_seq += 1
        entry = _Entry(self._last_seq, event, cost_bytes, tokens)
        self._pending.append(entry)
        self._count(cost_bytes, tokens)
        return entry

    def _count(self, cost_bytes: int, tokens: int) -> None:
        self.undelivered_tokens += tokens
        self.undelivered_bytes += cost_bytes
        self.peak_bytes = max(self.peak_bytes, self.undelivered_bytes)

    def take(self, limit_bytes: int | None = None) -> list[tuple[int, OutputEvent]]:
        """Hand over what is pending, with its numbers; it is in flight until delivered.

        Args:
            limit_bytes: Stop before the event whose cost would exceed this in sum, but hand
                over at least one, for an event is never split. ``None`` hands over all.
        """
        taken: list[tuple[int, OutputEvent]] = []
        taken_bytes = 0
        while self._pending:
            entry = self._pending[0]
            taken_bytes += entry.cost_bytes
            if taken and limit_bytes is not None and taken_bytes > limit_bytes:
                break
            self._pending.popleft()
            event = entry.whole()
            if isinstance(event, TextDelta):
                self._open.pop(event.choice, None)
            self._in_flight.append((entry.seq, entry.cost_bytes, entry.tokens))
            taken.append((entry.seq, event))
        return taken

    def delivered(self, seq: int) -> None:
        """The socket accepted all events up to this number. Idempotent."""
        while self._in_flight and self._in_flight[0][0] <= seq:
            _, cost_bytes, tokens = self._in_flight.popleft()
            self.undelivered_bytes -= cost_bytes
            self.undelivered_tokens -= tokens
