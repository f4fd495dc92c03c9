"""Holds what each client of a storm saw against what is on record.

The rules:

1. A request has one record; one that was turned away at the door, for its key, has none.
2. Its outcome has a cause: nobody is cancelled as disconnected who did not leave, none times out
   before its time, none fails where nothing was made to fail.
3. Who reads to the end of a request that finished has all of the text, a status of success and,
   in a stream, ``[DONE]``. What is billed is what was said.
4. Who reads to the end of one that did not finish has an error and no ``[DONE]``. All text that
   anyone has is a beginning of the whole.
5. Who reads at once waits no longer than the request's deadline allows, or the drain's.
6. When a client has left, or was told that its request is cancelled, the request has ended: at
   that very moment of virtual time.
7. No request of a client that reads at once times out while it is paused.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

from triolet.runtime.record import RequestRecord
from triolet.testing.lines import Expected, expected, line
from triolet.testing.schedule import KEYS, Ask, Schedule
from triolet.testing.visitor import Seen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_OK, _LEAST_ERROR, _UNAUTHORIZED = 200, 400, 401
#: Seconds by which sums of floating point times may be off.
_EPSILON_S = 1e-6
#: What an unfinished character becomes at an end.
_REPLACEMENT = "\ufffd"


@attrs.frozen
class Story:
    """One request: what was asked, what the client saw, what is on record."""

    ask: Ask
    seen: Seen
    records: tuple[RequestRecord, ...]
    #: When the record was written.
    recorded_s: float | None = None
    #: Whether the engine had paused it for some time when it was aborted.
    stuck: bool = False

    @property
    def outcome(self) -> str:
        """How it ended; empty without a record."""
        return self.records[0].outcome if self.records else ""

    def __str__(self) -> str:
        """One line, without anything that differs from one play to the next."""
        billed = [record.usage.output_tokens for record in self.records]
        fields = attrs.asdict(self.seen)
        return f"{self.outcome} {billed} {self.recorded_s} {fields}"


def judge(schedule: Schedule, stories: Iterable[Story]) -> list[str]:
    """What does not fit, a sentence each."""
    judgement = _Judgement(schedule)
    return [
        f"request {story.ask.number}: {complaint}"
        for story in stories
        for complaint in judgement.of(story)
    ]


@attrs.frozen
class _Judgement:
    schedule: Schedule

    def of(self, story: Story) -> Iterator[str]:
        yield from self._recorded(story)
        if not story.records:
            return
        yield from self._caused(story)
        yield from self._said(story)
        yield from self._in_time(story)

    def _recorded(self, story: Story) -> Iterator[str]:
        turned_away = self.schedule.stage.keyed and story.ask.key == len(KEYS) - 1
        if turned_away:
            if story.records or (story.seen.stayed and story.seen.status != _UNAUTHORIZED):
                yield f"had a wrong key and came to {story.seen.status} {story.outcome}"
        elif len(story.records) != 1:
            yield f"has {len(story.records)} records"

    def _caused(self, story: Story) -> Iterator[str]:
        ask, seen, outcome = story.ask, story.seen, story.outcome
        lasted_s = seen.ended_s - seen.began_s
        refused = seen.status >= _LEAST_ERROR and not seen.texts
        caused = {
            "finished": True,
            "rejected": refused or not seen.stayed,
            "failed": bool(self.schedule.faults),
            "cancelled:disconnect": not seen.stayed and not seen.hung_up,
            "cancelled:slow_client": seen.hung_up,
            "cancelled:client_cancel": ask.cancels_after_s is not None,
            "cancelled:timeout": (not seen.stayed or lasted_s >= self._least_s(story) - _EPSILON_S),
            "cancelled:shutdown": bool(self.schedule.drains),
        }
        if not caused.get(outcome, False):
            yield f"is on record as {outcome!r} without a cause; its client saw {seen}"

    def _said(self, story: Story) -> Iterator[str]:
        ask, seen, record = story.ask, story.seen, story.records[0]
        for choice, text in seen.texts.items():
            if not line(ask, choice).startswith(text.rstrip(_REPLACEMENT)):
                yield f"choice {choice} said {text!r} instead of {line(ask, choice)!r}"
        if seen.disordered:
            yield f"said something of a choice after its end: {seen}"
        wanted = {i: expected(ask, i) for i in range(ask.n * len(ask.prompts))}
        tokens = sum(choice.tokens for choice in wanted.values())
        if record.usage.output_tokens > tokens:
            yield f"is billed {record.usage.output_tokens} tokens of {tokens} at most"
        if story.outcome != "finished":
            yield from self._cut_short(story)
            return
        if record.usage.output_tokens != tokens:
            yield f"is billed {record.usage.output_tokens} tokens instead of {tokens}"
        if seen.stayed:
            yield from self._whole(seen, wanted)

    def _cut_short(self, story: Story) -> Iterator[str]:
        seen = story.seen
        if seen.done or (seen.stayed and seen.error is None):
            yield f"ended as {story.outcome}, and its client saw {seen}"
        if seen.status == _OK and seen.complete:
            yield f"ended as {story.outcome}, and its response is complete: {seen}"

    def _whole(self, seen: Seen, wanted: dict[int, Expected]) -> Iterator[str]:
        tokens = sum(choice.tokens for choice in wanted.values())
        if seen.status != _OK or not (seen.done and seen.complete) or seen.error:
            yield f"finished, and its client saw {seen}"
        for choice, whole in wanted.items():
            got = (seen.texts.get(choice, ""), seen.finishes.get(choice))
            if got != (whole.text, whole.finish):
                yield f"choice {choice} came to {got} instead of {whole}"
        if seen.output_tokens not in {None, tokens}:
            yield f"was told of {seen.output_tokens} tokens instead of {tokens}"

    def _in_time(self, story: Story) -> Iterator[str]:
        ask, seen, recorded_s = story.ask, story.seen, story.recorded_s or 0.0
        gone_s = seen.cancelled_s if seen.stayed else seen.ended_s
        if gone_s is not None and recorded_s > gone_s + _EPSILON_S:
            yield f"was given up at {gone_s:g} and ended at {recorded_s:g}"
        if not seen.stayed or ask.pauses or ask.read_s:
            return
        if story.stuck and story.outcome == "cancelled:timeout":
            yield "timed out while it was paused, and its client reads at once"
        stage = self.schedule.stage
        # What the body says is known once it is there.
        own_s = ask.timeout_s if ask.uploads else None
        most_s = min(stage.request_timeout, own_s or math.inf)
        lasted_s = seen.ended_s - seen.began_s
        if lasted_s > most_s + _EPSILON_S:
            yield f"lasted {lasted_s:g} s of {most_s:g} s"
        # Who still sends its body is no running request; the listener ends its connection.
        drains = sorted(drain.at_s for drain in self.schedule.drains) if ask.uploads else ()
        for number, at_s in enumerate(drains):
            patience_s = stage.drain_timeout if number == 0 else 0.0
            stopped_s = max(seen.began_s, at_s + patience_s)
            if seen.ended_s > stopped_s + _EPSILON_S:
                yield f"lasted until {seen.ended_s:g}, beyond the drain's end at {stopped_s:g}"

    def _least_s(self, story: Story) -> float:
        """Seconds before which it cannot time out."""
        stage, ask = self.schedule.stage, story.ask
        least_s = min(stage.request_timeout, ask.timeout_s or math.inf)
        if story.records[0].first_scheduled_ns is None:
            least_s = min(least_s, stage.queue_timeout or math.inf)
        return least_s
