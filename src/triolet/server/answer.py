"""How OpenAI's completion endpoints say what a request says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from triolet.core import FinishReason
from triolet.wire.chat import ChatChunks, chat_choice, chat_completion
from triolet.wire.common import UsageBody, usage_body
from triolet.wire.completions import CompletionChunks, completion, completion_choice

if TYPE_CHECKING:
    from triolet.output.events import ChoiceFinished, TextDelta, Usage
    from triolet.server.event_stream import FoldedChoice
    from triolet.wire.common import StreamOptions


@attrs.frozen
class CompletionAnswer:
    """One response of ``/v1/chat/completions`` or ``/v1/completions``.

    The two differ in the shape of their bodies alone, which three writers of
    :mod:`triolet.wire` know; what is said when is the same.
    """

    chunks: ChatChunks | CompletionChunks
    _choice: Callable[[int, str, FinishReason, int | str | None], Any]
    _whole: Callable[[str, int, str, list[Any], UsageBody], Mapping[str, object]]
    _continuous_usage: bool
    #: Choices that have said something: the role goes out with the first chunk of each.
    _begun: set[int] = attrs.field(factory=set, init=False)

    @property
    def id(self) -> str:
        """The id in the body and in ``X-Request-Id``."""
        return self.chunks.id

    def chunk(
        self, delta: TextDelta, finish: ChoiceFinished | None, usage: Usage
    ) -> Mapping[str, object]:
        """See :class:`triolet.server.event_stream.Answer`."""
        first = delta.choice not in self._begun
        self._begun.add(delta.choice)
        running = _body(usage) if self._continuous_usage else None
        if finish is None:
            return self.chunks.text(delta.choice, delta.text, first=first, running=running)
        return self.chunks.finish(
            finish.choice,
            finish.reason,
            finish.stop_reason,
            text=delta.text,
            first=first,
            running=running,
        )

    def last_chunk(self, usage: Usage) -> Mapping[str, object] | None:
        """See :class:`triolet.server.event_stream.Answer`."""
        return self.chunks.usage(_body(usage)) if self.chunks.include_usage else None

    def body(self, choices: Mapping[int, FoldedChoice], usage: Usage) -> Mapping[str, object]:
        """See :class:`triolet.server.event_stream.Answer`."""
        written = [
            self._choice(index, choice.text, choice.finish.reason, choice.finish.stop_reason)
            for index, choice in sorted(choices.items())
            if choice.finish is not None
        ]
        chunks = self.chunks
        return self._whole(chunks.id, chunks.created, chunks.model, written, _body(usage))


def chat_answer(
    request_id: str, created: int, model: str, options: StreamOptions | None
) -> CompletionAnswer:
    """The answer to a chat request; ``created`` in Unix seconds."""
    return CompletionAnswer(
        ChatChunks(
            request_id, created, model, include_usage=bool(options and options.include_usage)
        ),
        chat_choice,
        chat_completion,
        continuous_usage=bool(options and options.continuous_usage_stats),
    )


def completion_answer(
    request_id: str, created: int, model: str, options: StreamOptions | None
) -> CompletionAnswer:
    """The answer to a text completion request; ``created`` in Unix seconds."""
    return CompletionAnswer(
        CompletionChunks(
            request_id, created, model, include_usage=bool(options and options.include_usage)
        ),
        completion_choice,
        completion,
        continuous_usage=bool(options and options.continuous_usage_stats),
    )


def _body(usage: Usage) -> UsageBody:
    return usage_body(
        usage.prompt_tokens,
        usage.output_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )
