"""``/v1/chat/completions``: what goes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triolet.wire.common import UsageBody
    from triolet.wire.logprobs import ChatLogprobs, PromptLogprobs
    from triolet.wire.said import Said


class ChatDelta(TypedDict, total=False):
    """What a chunk adds to a choice's message. Clients concatenate what they find here."""

    role: Literal["assistant"]
    content: str


class ChatChunkChoice(TypedDict):
    """One choice in a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    #: Ours, once the choice has finished: the stop id or stop string that did it.
    stop_reason: NotRequired[int | str | None]
    #: Ours and vLLM's, with ``return_token_ids``: the ids since the last chunk.
    token_ids: NotRequired[list[int]]


class ChatCompletionChunk(TypedDict):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageBody | None]
    #: With the first token, if asked for.
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChatReply(TypedDict):
    """The message of a finished choice."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """One choice of a response that is not streamed."""

    index: int
    message: ChatReply
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """A chat completion that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


@attrs.frozen
class ChatBodies:
    """Writes one response, in chunks or whole.

    Plain dictionaries: this runs once per token, and they encode twice as fast as attrs
    instances.
    """

    id: str
    #: Unix seconds.
    created: int
    model: str
    #: Every chunk has a ``usage`` then, ``null`` but in the last one.
    include_usage: bool = False

    def chunk(self, said: Said, running: UsageBody | None = None) -> ChatCompletionChunk:
        """Write what is new of a choice.

        Args:
            said: What is new. The last text of a choice may stand with its finish.
            running: The usage so far, for ``continuous_usage_stats``.
        """
        delta: ChatDelta = {"role": "assistant"} if said.first else {}
        if said.text or said.reason is None:
            delta["content"] = said.text
        choice: ChatChunkChoice = {
            "index": said.index,
            "delta": delta,
            "logprobs": said.logprobs,  # type: ignore[typeddict-item]  # each endpoint has its form
            "finish_reason": None if said.reason is None else said.reason.value,
        }
        if said.reason is not None:
            choice["stop_reason"] = said.stop_reason
        if said.token_ids is not None:
            choice["token_ids"] = list(said.token_ids)
        chunk = self._chunk([choice], running)
        if said.prompt:
            chunk.update(said.prompt)  # type: ignore[typeddict-item]  # the two optional fields
        return chunk

    def opening(self, index: int, running: UsageBody | None = None) -> ChatCompletionChunk:
        """Write that a choice exists: it speaks later than one with a higher index.

        The SDK's stream helper knows no choice that it has not met in ascending order.
        """
        return self._chunk(
            [
                {
                    "index": index,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
            ],
            running,
        )

    def usage(self, usage: UsageBody) -> ChatCompletionChunk:
        """Write the totals: the last chunk, and the only one without choices."""
        return self._chunk([], usage)

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: UsageBody | None
    ) -> ChatCompletionChunk:
        chunk: ChatCompletionChunk = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }
        if self.include_usage or usage is not None:
            chunk["usage"] = usage
        return chunk

    def whole(self, choices: Sequence[Said], usage: UsageBody) -> ChatCompletion:
        """Write the response at once; ``choices`` are all of each, in the order of indices."""
        body: ChatCompletion = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": [_whole(said) for said in choices],
            "usage": usage,
        }
        prompt: Mapping[str, object] = choices[0].prompt
        body.update(prompt)  # type: ignore[typeddict-item]  # the two optional fields
        return body


def _whole(said: Said) -> ChatChoice:
    choice: ChatChoice = {
        "index": said.index,
        "message": {"role": "assistant", "content": said.text, "refusal": None},
        "logprobs": said.logprobs,  # type: ignore[typeddict-item]  # each endpoint has its form
        "finish_reason": None if said.reason is None else said.reason.value,
        "stop_reason": said.stop_reason,
    }
    if said.token_ids is not None:
        choice["token_ids"] = list(said.token_ids)
    return choice
