"""One request's way from token ids to events: the text machines put together.

Rules:

1. Ids are taken one by one. The joined texts, ids and logprobs, the finish reasons and the usage
   are facts of the id sequence; how it was grouped into outputs shows only in the deltas' borders.
2. At one token: end-of-sequence id, then stop id, then stop string, then length. The first two
   and the last are the engine's to find; it says so with the last id of an output. A stop
   string that completes earlier in that output wins over it, and later ids are dropped.
3. A stop string that completes with output token k ends the choice only if k is at least
   ``min_tokens``; before that it is text. It may begin anywhere.
4. The id that ends a choice is accepted: it stands in the ids and the usage. An
   end-of-sequence id adds no text. A stop id adds its own with ``include_stop``, if it is not
   special and skipped. Neither waits for the stop strings: what was held is shown before it.
5. A choice ends with all its text: held text and what an unfinished character leaves. Text
   that only the end made certain can still complete a stop string, except after rule 4.
6. Where an output has logprobs it has one for each id, and each goes where its id goes: into the
   same delta, or nowhere.
7. Per fed output: :class:`PromptScored` if it is the prompt's first, at most one
   :class:`TextDelta`, then :class:`ChoiceFinished`; after the last choice's of all prompts,
   :class:`Completed`. A delta with neither text nor ids is left out.
8. :meth:`RequestOutput.fail` shows what is pending, per choice, then :class:`Failed`. So does
   it after :meth:`RequestOutput.feed` has raised: ids before the bad one are not lost.
9. After the terminal event, and after an exception until :meth:`RequestOutput.fail`: silence.
10. The engine knows no text. A choice that a stop string ended runs on in it until it is told:
    the choice stands in :attr:`RequestOutput.choices_to_end` if others of its prompt go on; with
    the last of them the whole prompt stands in :attr:`RequestOutput.prompts_to_abort` instead.

What a choice accepts waits in its own buffers until a whole output is done, so an exception in
the midst of one neither loses nor repeats text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from triolet.core import FinishReason, TokenLogprobs, Vocabulary
from triolet.errors import OutputError
from triolet.output.detokenizer import Detokenizer
from triolet.output.events import (
    ChoiceFinished,
    Completed,
    Failed,
    OutputEvent,
    PromptScored,
    TextDelta,
    Usage,
)
from triolet.output.stops import StopMatcher

if TYPE_CHECKING:
    from triolet.core import TokenOutput
    from triolet.errors import TrioletError


@attrs.define(eq=False)
class _Choice:
    """One choice, and what of it was accepted but not yet handed out."""

    #: Over all prompts.
    index: int
    detokenizer: Detokenizer
    matcher: StopMatcher
    #: Output tokens before which a stop string is only text.
    min_tokens: int
    accepted: int = 0
    finished: bool = False
    #: Whether the engine may still generate for it, as far as we were told.
    in_engine: bool = True
    text: list[str] = attrs.field(factory=list)
    ids: list[int] = attrs.field(factory=list)
    logprobs: list[TokenLogprobs] = attrs.field(factory=list)

    def consume(self, output: TokenOutput) -> ChoiceFinished | None:
        """Accept the ids of one output; the finish, if one of them or the engine ended it."""
        ids, finish, logprobs = output.token_ids, output.finish, output.logprobs
        ends_with_id = finish is FinishReason.STOP and bool(ids)
        for place, token_id in enumerate(ids[:-1] if ends_with_id else ids):
            text = self.detokenizer.push(token_id)
            self._accept(token_id)
            if logprobs:
                self.logprobs.append(logprobs[place])
            ended = self._release(text)
            if ended is not None:
                return ended
        if finish is None:
            return None
        if finish is FinishReason.STOP:
            return self._end_by_id(ids[-1:], logprobs[-1:], output.stop_token_id)
        ended = self._release(self.detokenizer.finish())
        self.text.append(self.matcher.finish())
        return ended or ChoiceFinished(self.index, finish)

    def _accept(self, token_id: int) -> None:
        self.ids.append(token_id)
        self.accepted += 1

    def _release(self, text: str) -> ChoiceFinished | None:
        released = self.matcher.feed(text, counts=self.accepted >= self.min_tokens)
        self.text.append(released.text)
        if released.stop is None:
            return None
        return ChoiceFinished(self.index, FinishReason.STOP, released.stop)

    def _end_by_id(
        self,
        last: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        stop_token_id: int | None,
    ) -> ChoiceFinished:
        """End on the engine's word. ``last`` is empty where the id came with an earlier output."""
        shown = ""
        for token_id in last:
            if stop_token_id is not None and self.matcher.include_stop:
                shown = self.detokenizer.push(token_id)
            self._accept(token_id)
            self.logprobs += logprobs
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
        delta = TextDelta(self.index, text, tuple(self.ids), tuple(self.logprobs))
        self.text.clear()
        self.ids.clear()
        self.logprobs.clear()
        return [delta]


@attrs.define(eq=False)
class RequestOutput:
    """Turns the engine's outputs of one request into its events.

    A request has one or more prompts and ``n`` choices of each. The engine runs each prompt as
    a request of its own and numbers its choices from 0.

    Raises:
        InvalidRequestError: A stop string is empty; ``param`` is ``stop``.
    """

    vocabulary: Vocabulary
    #: Per prompt, its tokens.
    prompt_tokens: tuple[int, ...]
    #: Choices of each prompt, at least 1.
    n: int = 1
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    #: Output tokens that a choice has before a stop string can end it.
    min_tokens: int = 0
    #: Per prompt, its ids, for detokenizers that look back; empty means that they need not.
    prompt_ids: tuple[Sequence[int], ...] = attrs.field(default=(), kw_only=True, repr=False)
    #: Prompt tokens that needed no computing, of all prompts as far as the engine has told.
    cached_tokens: int = attrs.field(default=0, init=False)
    #: Output tokens of reasoning; whoever learns it sets it.
    reasoning_tokens: int = attrs.field(default=0, kw_only=True)
    #: Whether the terminal event was handed out.
    ended: bool = attrs.field(init=False, default=False)
    _broken: bool = attrs.field(init=False, default=False)
    #: Per prompt, its choices.
    _choices: list[list[_Choice]] = attrs.field(init=False)
    #: Per prompt, its choices that have not finished.
    _unfinished: list[int] = attrs.field(init=False)
    #: Prompts with an unfinished choice.
    _running: int = attrs.field(init=False)
    #: Prompts whose scores were taken, and scores that were not handed out yet.
    _scored: set[int] = attrs.field(init=False, factory=set)
    _scores: list[OutputEvent] = attrs.field(init=False, factory=list)
    _to_abort: set[int] = attrs.field(init=False, factory=set)
    #: Prompt and choice of it.
    _to_end: set[tuple[int, int]] = attrs.field(init=False, factory=set)

    @_choices.default
    def _new_choices(self) -> list[list[_Choice]]:
        matcher = StopMatcher(self.stops, self.include_stop)
        prompts = self.prompt_ids or [()] * len(self.prompt_tokens)
        return [
            [
                _Choice(
                    prompt * self.n + number,
                    Detokenizer(self.vocabulary, self.skip_special_tokens, ids),
                    matcher.fresh(),
                    self.min_tokens,
                )
                for number in range(self.n)
            ]
            for prompt, (_, ids) in enumerate(zip(self.prompt_tokens, prompts, strict=True))
        ]

    @_unfinished.default
    def _all_choices(self) -> list[int]:
        return [self.n] * len(self.prompt_tokens)

    @_running.default
    def _all_prompts(self) -> int:
        return len(self.prompt_tokens)

    @property
    def usage(self) -> Usage:
        """What was accepted so far, over all choices."""
        return Usage(
            sum(self.prompt_tokens),
            sum(choice.accepted for choices in self._choices for choice in choices),
            self.cached_tokens,
            self.reasoning_tokens,
        )

    @property
    def prompts_in_engine(self) -> tuple[int, ...]:
        """Prompts of which the engine, to our knowledge, still runs a choice."""
        return tuple(filter(self._in_engine, range(len(self._choices))))

    @property
    def prompts_to_abort(self) -> tuple[int, ...]:
        """Those of :attr:`prompts_in_engine` that nobody wants more of.

        All choices of such a prompt have finished, or the request has ended. The caller aborts
        it in the engine and says so with :meth:`left_engine`. It may look after every call.
        """
        return tuple(sorted(self._to_abort)) if self._to_abort else ()

    @property
    def choices_to_end(self) -> tuple[tuple[int, int], ...]:
        """Choices that nobody wants more of, of prompts that go on: prompt, number within it.

        The caller ends each in the engine and says so with :meth:`choice_left_engine`. It may
        look after every call. None of these is of a prompt in :attr:`prompts_to_abort`.
        """
        return tuple(sorted(self._to_end)) if self._to_end else ()

    def left_engine(self, prompt: int) -> None:
        """The engine runs this prompt no more: it was aborted, or has failed."""
        for number in range(self.n):
            self.choice_left_engine(prompt, number)
        self._to_abort.discard(prompt)

    def choice_left_engine(self, prompt: int, number: int) -> None:
        """The engine runs this choice no more: it has ended it, or was told to."""
        self._choices[prompt][number].in_engine = False
        self._to_end.discard((prompt, number))

    def feed(self, output: TokenOutput, prompt: int = 0) -> list[OutputEvent]:
        """The events of one engine output.

        Args:
            output: What the engine says of one choice of a prompt.
            prompt: The index of that prompt.

        Raises:
            OutputError: An id is outside the vocabulary, the choice was not asked for, or ids
                and logprobs differ in number. This request cannot go on: the caller has to call
                :meth:`fail`, and to abort what then is in :attr:`prompts_to_abort`.
        """
        # A negative index would count from the end: the wrong choice instead of an error.
        asked = 0 <= prompt < len(self._choices) and 0 <= output.choice < self.n
        if asked and output.finish is not None:
            self.choice_left_engine(prompt, output.choice)
            if prompt in self._to_abort and not self._in_engine(prompt):
                self._to_abort.discard(prompt)
        if self.ended or self._broken:
            return []
        if not asked:
            self._broken = True
            raise OutputError(
                f"The engine answered for choice {output.choice} of prompt {prompt}, with "
                f"{len(self._choices)} prompts of {self.n} choices asked for; "
                "this is a bug in the engine."
            )
        try:
            return self._feed(output, prompt)
        except BaseException:
            self._broken = True
            raise

    def _in_engine(self, prompt: int) -> bool:
        return any(choice.in_engine for choice in self._choices[prompt])

    def _feed(self, output: TokenOutput, prompt: int) -> list[OutputEvent]:
        choice = self._choices[prompt][output.choice]
        self.cached_tokens += output.cached_tokens
        if output.prompt_logprobs and prompt not in self._scored:
            self._scored.add(prompt)
            self._scores.append(PromptScored(prompt, output.prompt_logprobs))
        finish = None if choice.finished else self._consume(output, choice)
        events, self._scores = self._scores, []
        if choice.finished:
            return events
        events += choice.hand_out()
        if finish is not None:
            choice.finished = True
            events.append(finish)
            events += self._count_finish(prompt, output.choice)
        return events

    def _consume(self, output: TokenOutput, choice: _Choice) -> ChoiceFinished | None:
        if output.logprobs and len(output.logprobs) != len(output.token_ids):
            raise OutputError(
                f"The engine gave {len(output.logprobs)} logprobs for "
                f"{len(output.token_ids)} tokens; this is a bug in the engine."
            )
        return choice.consume(output)

    def _count_finish(self, prompt: int, number: int) -> list[OutputEvent]:
        """One more choice of a prompt has finished; the success end, if it was the last."""
        self._unfinished[prompt] -= 1
        if self._unfinished[prompt]:
            if self._choices[prompt][number].in_engine:
                self._to_end.add((prompt, number))
            return []
        if self._in_engine(prompt):
            self._abort(prompt)
        self._running -= 1
        if self._running:
            return []
        self.ended = True
        return [Completed(self.usage)]

    def _abort(self, prompt: int) -> None:
        self._to_abort.add(prompt)
        self._to_end.difference_update([(prompt, number) for number in range(self.n)])

    def fail(self, error: TrioletError) -> list[OutputEvent]:
        """End the request in any other way: what is pending, then the failure."""
        if self.ended:
            return []
        self.ended = True
        for prompt in self.prompts_in_engine:
            self._abort(prompt)
        events, self._scores = self._scores, []
        for choices in self._choices:
            for choice in choices:
                choice.flush()
                events += choice.hand_out()
        events.append(Failed(error, self.usage))
        return events
