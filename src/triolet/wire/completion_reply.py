"""``/v1/completions``: what goes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.wire.common import UsageBody
    from triolet.wire.logprobs import CompletionLogprobs, PromptLogprobs
    from triolet.wire.said import Said


class CompletionChoice(TypedDict):
    """One choice, in a chunk or whole. Choice i of prompt p has the index ``p * n + i``."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    #: Ours, once the choice has finished: the stop id or stop string that did it.
    stop_reason: NotRequired[int | str | None]
    #: Ours and vLLM's, with ``return_token_ids``: the ids since the last chunk.
    token_ids: NotRequired[list[int]]
    #: With the first chunk of a choice, if asked for.
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class CompletionChunk(TypedDict):
    """One event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[CompletionChoice]
    usage: NotRequired[UsageBody | None]


class Completion(TypedDict):
    """A completion that is not streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[CompletionChoice]
    usage: UsageBody


@attrs.frozen
class CompletionBodies:
    """Writes one response, in chunks or whole, as :class:`~triolet.wire.chat_reply.ChatBodies`."""

    id: str
    #: Unix seconds.
    created: int
    model: str
    #: Every chunk has a ``usage`` then, ``null`` but in the last one.
    include_usage: bool = False

    def chunk(self, said: Said, running: UsageBody | None = None) -> CompletionChunk:
        """Write what is new of a choice; see :meth:`triolet.wire.chat_reply.ChatBodies.chunk`."""
        return self._chunk([_choice(said)], running)

    def usage(self, usage: UsageBody) -> CompletionChunk:
        """Write the totals: the last chunk, and the only one without choices."""
        return self._chunk([], usage)

    def _chunk(self, choices: list[CompletionChoice], usage: UsageBody | None) -> CompletionChunk:
        chunk: CompletionChunk = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }
        if self.include_usage or usage is not None:
            chunk["usage"] = usage
        return chunk

    def whole(self, choices: Sequence[Said], usage: UsageBody) -> Completion:
        """Write the response at once; ``choices`` are all of each, in the order of indices."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": [_choice(said) for said in choices],
            "usage": usage,
        }


def _choice(said: Said) -> CompletionChoice:
    choice: CompletionChoice = {
        "index": said.index,
        "text": said.text,
        "logprobs": said.logprobs,  # type: ignore[typeddict-item]  # each endpoint has its form
        "finish_reason": None if said.reason is None else said.reason.value,
    }
    if said.reason is not None:
        choice["stop_reason"] = said.stop_reason
    if said.token_ids is not None:
        choice["token_ids"] = list(said.token_ids)
    if said.prompt:
        choice.update(said.prompt)  # type: ignore[typeddict-item]  # the two optional fields
    return choice
