"""One request's way from token ids to events: the text machines put together.

Rules:

1. Ids are taken one by one. The joined texts and ids, the finish reasons and the usage are
   facts of the id sequence; how it was grouped into outputs shows only in the deltas' borders.
2. At one token: end-of-sequence id, then stop id, then stop string, then length. The first two
   and the last are the engine's to find; it says so with the last id of an output. A stop
   string that completes earlier in that output wins over it, and later ids are dropped.
3. The id that ends a choice is accepted: it stands in the ids and the usage. An
   end-of-sequence id adds no text. A stop id adds its own with ``include_stop``, if it is not
   special and skipped. Neither waits for the stop strings: what was held is shown before it.
4. A choice ends with all its text: held text and what an unfinished character leaves. Text
   that only the end made certain can still complete a stop string, except after rule 3.
5. Per fed output: at most one :class:`TextDelta`, then :class:`ChoiceFinished`; after the last
   choice's, :class:`Completed`. A delta with neither text nor ids is left out.
6. :meth:`RequestOutput.fail` shows what is pending, per choice, then :class:`Failed`. So does
   it after :meth:`RequestOutput.feed` has raised: ids before the bad one are not lost.
7. After the terminal event, and after an exception until :meth:`RequestOutput.fail`: silence.

What a choice accepts waits in its own buffers until a whole output is done, so an exception in
the midst of one neither loses nor repeats text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from triolet.core import FinishReason, Vocabulary
from triolet.errors import OutputError
from triolet.output.detokenizer import Detokenizer
from triolet.output.events import ChoiceFinished, Completed, Failed, TextDelta, Usage
from triolet.output.stops import StopMatcher

if TYPE_CHECKING:
    from triolet.core import TokenOutput
    from triolet.errors import TrioletError
    from triolet.output.events import OutputEvent


@attrs.define(eq=False)
class _Choice:
    """One choice, and what of it was accepted but not yet handed out."""

    index: int
    detokenizer: Detokenizer
    matcher: StopMatcher
    accepted: int = 0
    finished: bool = False
    #: Whether a stop string ended it and the engine has not said since that it stopped.
    engine_runs_on: bool = False
    text: list[str] = attrs.field(factory=list)
    ids: list[int] = attrs.field(factory=list)

    def consume(self, output: TokenOutput) -> ChoiceFinished | None:
        """Accept the ids of one output; the finish, if one of them or the engine ended it."""
        ids, finish = output.token_ids, output.finish
        ends_with_id = finish is FinishReason.STOP and bool(ids)
        for token_id in ids[:-1] if ends_with_id else ids:
            text = self.detokenizer.push(token_id)
            self._accept(token_id)
            ended = self._release(text)
            if ended is not None:
                return ended
        if finish is None:
            return None
        if finish is FinishReason.STOP:
            return self._end_by_id(ids[-1:], output.stop_token_id)
        ended = self._release(self.detokenizer.finish())
        self.text.append(self.matcher.finish())
        return ended or ChoiceFinished(self.index, finish)

    def _accept(self, token_id: int) -> None:
        self.ids.append(token_id)
        self.accepted += 1

    def _release(self, text: str) -> ChoiceFinished | None:
        released = self.matcher.feed(text)
        self.text.append(released.text)
        if released.stop is None:
            return None
        return ChoiceFinished(self.index, FinishReason.STOP, released.stop)

    def _end_by_id(self, last: tuple[int, ...], stop_token_id: int | None) -> ChoiceFinished:
        """End on the engine's word. ``last`` is empty where the id came with an earlier output."""
        shown = ""
        for token_id in last:
            if stop_token_id is not None and self.matcher.include_stop:
                shown = self.detokenizer.push(token_id)
            self._accept(token_id)
        self.text += (self.matcher.finish(), shown, self.detokenizer.finish())
        return ChoiceFinished(self.index, FinishReason.STOP, stop_token_id)

    def flush(self) -> None:
        """Release what waits for more; the request failed and nothing more comes."""
        if not self.finished:
            self.text += (self.matcher.finish(), self.detokenizer.finish())

    def hand_out(self) -> list[OutputEvent]:
        """A delta of what has not been handed out yet, if there is anything."""
        text = "".join(self.text)
        if not text and not self.ids:
            return []
        delta = TextDelta(self.index, text, tuple(self.ids))
        self.text.clear()
        self.ids.clear()
        return [delta]


@attrs.define(eq=False)
class RequestOutput:
    """Turns the engine's outputs of one request into its events.

    Raises:
        InvalidRequestError: A stop string is empty; ``param`` is ``stop``.
    """

    vocabulary: Vocabulary
    #: Tokens of the prompt, counted once whatever ``choices`` is.
    prompt_tokens: int
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    choices: int = 1
    #: Whether the terminal event was handed out.
    ended: bool = attrs.field(init=False, default=False)
    _broken: bool = attrs.field(init=False, default=False)
    #: Choices that have not finished.
    _running: int = attrs.field(init=False)
    _choices: list[_Choice] = attrs.field(init=False)

    @_running.default
    def _all_choices(self) -> int:
        return self.choices

    @_choices.default
    def _new_choices(self) -> list[_Choice]:
        matcher = StopMatcher(self.stops, self.include_stop)
        return [
            _Choice(index, Detokenizer(self.vocabulary, self.skip_special_tokens), matcher.fresh())
            for index in range(self.choices)
        ]

    @property
    def usage(self) -> Usage:
        """What was accepted so far, over all choices."""
        return Usage(self.prompt_tokens, sum(choice.accepted for choice in self._choices))

    @property
    def finished_by_text(self) -> bool:
        """Whether all choices finished and the engine, to our knowledge, still runs one.

        It knows no text, so it cannot see a stop string: the caller has to abort it.
        """
        return not self._running and any(choice.engine_runs_on for choice in self._choices)

    def feed(self, output: TokenOutput) -> list[OutputEvent]:
        """The events of one engine output.

        Raises:
            OutputError: An id is outside the vocabulary, or the choice was not asked for. This
                request cannot go on: the caller has to call :meth:`fail`, and to abort the
                engine.
        """
        if self.ended or self._broken:
            return []
        try:
            return self._feed(output)
        except BaseException:
            self._broken = True
            raise

    def _feed(self, output: TokenOutput) -> list[OutputEvent]:
        if not 0 <= output.choice < self.choices:
            raise OutputError(
                f"The engine answered for choice {output.choice} of {self.choices}; "
                "this is a bug in the engine."
            )
        choice = self._choices[output.choice]
        if choice.finished:
            if output.finish is not None:
                choice.engine_runs_on = False
            return []
        finish = choice.consume(output)
        events = choice.hand_out()
        if finish is None:
            return events
        choice.finished = True
        choice.engine_runs_on = output.finish is None
        events.append(finish)
        self._running -= 1
        if not self._running:
            self.ended = True
            events.append(Completed(self.usage))
        return events

    def fail(self, error: TrioletError) -> list[OutputEvent]:
        """End the request in any other way: what is pending, then the failure."""
        if self.ended:
            return []
        self.ended = True
        events: list[OutputEvent] = []
        for choice in self._choices:
            choice.flush()
            events += choice.hand_out()
        events.append(Failed(error, self.usage))
        return events
