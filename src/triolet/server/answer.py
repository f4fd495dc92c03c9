"""How OpenAI's completion endpoints say what a request says.

Rules:

1. A chunk and a whole choice are one :class:`~triolet.wire.said.Said`, made by one function of
   the same events: streamed or not, the same is said.
2. What comes once with a choice (its role, the echoed prompt) comes with the first that it says;
   what comes once with a chat (what is told of its prompt) comes with its first token.
3. A chat's choices are met in ascending order. One that has nothing to say yet when a later one
   speaks is opened by a chunk of its own: a client's helper cannot know it otherwise, and to hold
   the later one back until it speaks has no bound. With logprobs every choice is opened so, right
   before it speaks: the helpers of OpenAI's SDKs (Python 3.57, Node 6.49) count the logprobs of
   the chunk in which they meet a choice twice.
4. A delta of ids without text is sent only if the client asked for ids or logprobs.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

import attrs

from triolet.core import TokenLogprobs
from triolet.output.detokenizer import Detokenizer
from triolet.output.logprobs import Spelling, TextOffsets
from triolet.wire.chat_reply import ChatBodies
from triolet.wire.common import UsageBody, usage_body
from triolet.wire.completion_reply import CompletionBodies
from triolet.wire.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from triolet.wire.said import Said

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from triolet.output.events import ChoiceFinished, PromptScored, TextDelta, Usage
    from triolet.server.event_stream import FoldedChoice

#: Per prompt, what was said of its tokens but the first.
Scores = dict[int, tuple[TokenLogprobs, ...]]


@attrs.frozen
class ShownPrompt:
    """A prompt, as far as a response tells of it."""

    ids: tuple[int, ...] = attrs.field(repr=False)
    #: Said before each choice; empty without ``echo``.
    text: str = attrs.field(default="", repr=False)


@attrs.frozen(kw_only=True)
class Wanted:
    """What the client asked to be told."""

    prompts: tuple[ShownPrompt, ...]
    spelling: Spelling
    #: Choices of each prompt.
    n: int = 1
    #: With each token so many of the most likely ones; ``None`` for no logprobs at all.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    echo: bool = False

    def of_prompt(self, prompt: int, scores: Scores) -> dict[str, object]:
        """The fields that tell of a prompt."""
        fields: dict[str, object] = {}
        if self.token_ids:
            fields["prompt_token_ids"] = list(self.prompts[prompt].ids)
        if self.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(
                scores.get(prompt, ()), self.spelling.token, top=self.prompt_logprobs
            )
        return fields


class Voice(Protocol):
    """How one endpoint says what a choice says."""

    @property
    def bodies(self) -> ChatBodies | CompletionBodies:
        """The writer of its bodies."""

    @property
    def scores(self) -> Scores:
        """What was said of the prompts so far."""

    def say(
        self, delta: TextDelta, finish: ChoiceFinished | None, *, first: bool, opens: bool
    ) -> Said:
        """What a choice says now.

        Args:
            delta: Its text, ids and logprobs since it spoke last.
            finish: Its end, if that is now.
            first: Whether it speaks for the first time.
            opens: Whether nobody has spoken before it.
        """


@attrs.define(eq=False)
class ChatVoice:
    """The words of ``/v1/chat/completions``."""

    bodies: ChatBodies
    wanted: Wanted
    scores: Scores = attrs.field(factory=dict, init=False)

    def say(
        self, delta: TextDelta, finish: ChoiceFinished | None, *, first: bool, opens: bool
    ) -> Said:
        """See :meth:`Voice.say`."""
        wanted = self.wanted
        said = _said(delta, finish, wanted, first=first)
        if wanted.logprobs is not None:
            said = attrs.evolve(
                said,
                logprobs=chat_logprobs(delta.logprobs, wanted.spelling.token, top=wanted.logprobs),
            )
        if opens:
            said = attrs.evolve(said, prompt=wanted.of_prompt(0, self.scores))
        return said


@attrs.define(eq=False)
class CompletionVoice:
    """The words of ``/v1/completions``."""

    bodies: CompletionBodies
    wanted: Wanted
    scores: Scores = attrs.field(factory=dict, init=False)
    #: Per choice, where its next token begins.
    _offsets: dict[int, TextOffsets] = attrs.field(factory=dict, init=False)

    def say(
        self,
        delta: TextDelta,
        finish: ChoiceFinished | None,
        *,
        first: bool,
        opens: bool,  # noqa: ARG002  # one shape for both endpoints: each choice tells of its prompt
    ) -> Said:
        """See :meth:`Voice.say`."""
        wanted = self.wanted
        prompt = delta.choice // wanted.n
        said = _said(delta, finish, wanted, first=first)
        if first:
            told = wanted.of_prompt(prompt, self.scores)
            said = attrs.evolve(said, text=wanted.prompts[prompt].text + said.text, prompt=told)
        if wanted.logprobs is not None:
            entries: list[TokenLogprobs | int] = []
            offsets: list[int] = []
            if first:
                self._begin(delta.choice, prompt, entries, offsets)
            push = self._offsets[delta.choice].push
            entries += delta.logprobs
            offsets += [push(entry.token_id) for entry in delta.logprobs]
            logprobs = completion_logprobs(
                entries, offsets, wanted.spelling.token, top=wanted.logprobs
            )
            said = attrs.evolve(said, logprobs=logprobs)
        return said

    def _begin(
        self, choice: int, prompt: int, entries: list[TokenLogprobs | int], offsets: list[int]
    ) -> None:
        """Begin to count a choice's characters, with those of the prompt that it echoes."""
        wanted, shown = self.wanted, self.wanted.prompts[prompt]
        vocabulary = wanted.spelling.vocabulary
        skip = wanted.spelling.skip_special_tokens
        self._offsets[choice] = TextOffsets(
            Detokenizer(vocabulary, skip, shown.ids), len(shown.text)
        )
        if not wanted.echo:
            return
        scores = self.scores.get(prompt)
        entries += shown.ids if scores is None else (shown.ids[0], *scores)
        # A detokenizer is told what came before: of a prompt, nothing that can be seen.
        unseen = tuple(takewhile(vocabulary.special_ids.__contains__, shown.ids))
        push = TextOffsets(Detokenizer(vocabulary, skip, unseen)).push
        # A text prompt is echoed as it came, and its tokens may spell it a little differently.
        offsets += [min(push(token_id), len(shown.text)) for token_id in shown.ids]


def _said(delta: TextDelta, finish: ChoiceFinished | None, wanted: Wanted, *, first: bool) -> Said:
    return Said(
        index=delta.choice,
        text=delta.text,
        token_ids=delta.token_ids if wanted.token_ids else None,
        reason=None if finish is None else finish.reason,
        stop_reason=None if finish is None else finish.stop_reason,
        first=first,
    )


@attrs.frozen(eq=False)
class CompletionAnswer:
    """One response of ``/v1/chat/completions`` or ``/v1/completions``."""

    voice: Voice
    continuous_usage: bool = False
    #: Choices that have said something.
    _begun: set[int] = attrs.field(factory=set, init=False)

    @property
    def id(self) -> str:
        """The id in the body and in ``X-Request-Id``."""
        return self.voice.bodies.id

    def scored(self, event: PromptScored) -> None:
        """See :class:`triolet.server.event_stream.Answer`."""
        self.voice.scores[event.prompt] = event.logprobs

    def chunks(
        self, delta: TextDelta, finish: ChoiceFinished | None, usage: Usage
    ) -> Iterator[Mapping[str, object]]:
        """See :class:`triolet.server.event_stream.Answer`."""
        first = delta.choice not in self._begun
        said = self.voice.say(delta, finish, first=first, opens=not self._begun)
        if not said.worth_sending:
            return
        running = _body(usage) if self.continuous_usage else None
        yield from self._openings(said, running)
        if said.first and said.index in self._begun:
            said = attrs.evolve(said, first=False)
        self._begun.add(said.index)
        yield self.voice.bodies.chunk(said, running)

    def _openings(self, said: Said, running: UsageBody | None) -> Iterator[Mapping[str, object]]:
        bodies = self.voice.bodies
        if not said.first or not isinstance(bodies, ChatBodies):
            return
        itself = said.logprobs is not None
        for unmet in sorted(set(range(said.index + itself)) - self._begun):
            self._begun.add(unmet)
            yield bodies.opening(unmet, running)

    def last_chunk(self, usage: Usage) -> Mapping[str, object] | None:
        """See :class:`triolet.server.event_stream.Answer`."""
        bodies = self.voice.bodies
        return bodies.usage(_body(usage)) if bodies.include_usage else None

    def body(self, choices: Mapping[int, FoldedChoice], usage: Usage) -> Mapping[str, object]:
        """See :class:`triolet.server.event_stream.Answer`."""
        said = [
            self.voice.say(choice.delta(index), choice.finish, first=True, opens=not place)
            for place, (index, choice) in enumerate(sorted(choices.items()))
        ]
        return self.voice.bodies.whole(said, _body(usage))


def _body(usage: Usage) -> UsageBody:
    return usage_body(
        usage.prompt_tokens,
        usage.output_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )
