"""``/v1/chat/completions``: what comes in and what goes out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NotRequired, TypedDict

import attrs

from triolet.errors import InvalidRequestError
from triolet.wire.codec import FieldError, Length, ReadBy, converter, described, mismatch
from triolet.wire.common import (
    REFUSED,
    GenerationFields,
    Label,
    Metadata,
    TokenLimit,
    UsageBody,
)

if TYPE_CHECKING:
    from triolet.core import FinishReason

#: Twice OpenAI's limit. Reading so many takes the event loop some 20 ms.
MAX_MESSAGES = 4096
#: Text parts of one message; a client that sends a document in lines stays well below.
MAX_PARTS = 1024
#: OpenAI's limit of a participant's name.
MAX_PARTICIPANT_CHARACTERS = 64
#: Parts are separate pieces of text: without a separator the last word of one and the first word
#: of the next would become one word. vLLM and llama.cpp use the same.
PART_SEPARATOR = "\n"

Role = Literal["system", "user", "assistant"]

_ROLES: Mapping[str, Role] = MappingProxyType({
    "system": "system",
    # OpenAI's newer name of the same thing; chat templates know only the older one.
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
})
_LATER_ROLES = frozenset({"tool", "function"})


def _read_role(value: object) -> Role:
    if type(value) is not str:
        raise mismatch("a string", value)
    if value in _LATER_ROLES:
        raise FieldError(f"is {value!r}: tool messages are not supported yet.")
    if value not in _ROLES:
        raise mismatch("one of 'system', 'developer', 'user' and 'assistant'", value)
    return _ROLES[value]


def _read_part_type(value: object) -> str:
    if type(value) is not str:
        raise mismatch("a string", value)
    if value != "text":
        raise FieldError(f"must be 'text', the only supported part, not {described(value)}.")
    return value


@attrs.frozen
class TextPart:
    """A piece of a message's text."""

    type: Annotated[str, ReadBy(_read_part_type)]
    text: str


def _read_content(value: object) -> str:
    if type(value) is str:
        return value
    if type(value) is not list:
        raise mismatch("a string or an array of text parts", value)
    Length(1, MAX_PARTS).check(value)
    parts = converter.structure(value, tuple[TextPart, ...])
    return PART_SEPARATOR.join(part.text for part in parts)


@attrs.frozen
class ChatMessage:
    """One message, its text parts joined."""

    role: Annotated[Role, ReadBy(_read_role)]
    content: Annotated[str, ReadBy(_read_content)]
    name: Annotated[str, Length(1, MAX_PARTICIPANT_CHARACTERS)] | None = None
    refuses: ClassVar[Mapping[str, tuple[object, ...]]] = MappingProxyType({
        "tool_calls": ([],),
        "function_call": (),
        "audio": (),
        "refusal": ("",),
        "reasoning": ("",),
        "reasoning_content": ("",),
        "prefix": (False,),
    })

    def for_template(self) -> dict[str, str]:
        """Return the message as chat templates expect it."""
        message: dict[str, str] = {"role": self.role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        return message


@attrs.frozen(kw_only=True)
class ChatRequest(GenerationFields):
    """The body of a chat completion request."""

    # Not in the repr, so that no log line holds somebody's prompt by accident.
    messages: Annotated[tuple[ChatMessage, ...], Length(1, MAX_MESSAGES)] = attrs.field(repr=False)
    max_completion_tokens: TokenLimit | None = None
    metadata: Metadata | None = None
    # Accepted without effect: hints to caches and billing of other servers, or without meaning
    # as long as there are no tools.
    parallel_tool_calls: bool = True
    service_tier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    safety_identifier: Label | None = None
    refuses: ClassVar[Mapping[str, tuple[object, ...]]] = MappingProxyType({
        **REFUSED,
        "logprobs": (False,),
        "tools": ([],),
        # Without tools, "auto" and "none" are the same.
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "reasoning": (),
        "thinking": (),
        "enable_thinking": (),
        "include_reasoning": (True,),
        "verbosity": ("medium",),
        "web_search_options": (),
        "documents": ([],),
        # A template is a program: a request does not bring its own.
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
        "mm_processor_kwargs": ({},),
    })

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        limits = (self.max_tokens, self.max_completion_tokens)
        if None not in limits and limits[0] != limits[1]:
            raise InvalidRequestError(
                "`max_completion_tokens` and `max_tokens` are two names of one limit and differ "
                f"({limits[1]} and {limits[0]}): send one of them.",
                param="max_completion_tokens",
            )

    @property
    def token_limit(self) -> int | None:
        """The limit of output tokens, under whichever of its names it came."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def template_messages(self) -> list[dict[str, str]]:
        """Return the messages as chat templates expect them."""
        return [message.for_template() for message in self.messages]


class ChatDelta(TypedDict, total=False):
    """What a chunk adds to a choice's message. Clients concatenate what they find here."""

    role: Literal["assistant"]
    content: str


class ChatChunkChoice(TypedDict):
    """One choice in a chunk."""

    index: int
    delta: ChatDelta
    logprobs: None
    finish_reason: str | None
    #: Ours, once the choice has finished: the stop id or stop string that did it.
    stop_reason: NotRequired[int | str | None]


class ChatCompletionChunk(TypedDict):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageBody | None]


class ChatReply(TypedDict):
    """The message of a finished choice."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """One choice of a response that is not streamed."""

    index: int
    message: ChatReply
    logprobs: None
    finish_reason: str
    stop_reason: int | str | None


class ChatCompletion(TypedDict):
    """A chat completion that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: UsageBody


@attrs.frozen
class ChatChunks:
    """Writes the chunks of one streamed response.

    Plain dictionaries: this runs once per token, and they encode twice as fast as attrs
    instances. ``running`` is the usage so far, for ``continuous_usage_stats``.
    """

    id: str
    #: Unix seconds.
    created: int
    model: str
    #: Every chunk has a ``usage`` then, ``null`` but in the last one.
    include_usage: bool = False

    def text(
        self, index: int, text: str, *, first: bool = False, running: UsageBody | None = None
    ) -> ChatCompletionChunk:
        """Write new text of a choice; ``first`` marks the first chunk of the choice."""
        delta: ChatDelta = {"role": "assistant", "content": text} if first else {"content": text}
        return self._chunk(
            [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], running
        )

    def finish(
        self,
        index: int,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        *,
        text: str = "",
        first: bool = False,
        running: UsageBody | None = None,
    ) -> ChatCompletionChunk:
        """Write the end of a choice, with its last text where there is some."""
        delta: ChatDelta = {"role": "assistant"} if first else {}
        if text:
            delta["content"] = text
        choice: ChatChunkChoice = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": reason.value,
            "stop_reason": stop_reason,
        }
        return self._chunk([choice], running)

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


def chat_choice(
    index: int, text: str, reason: FinishReason, stop_reason: int | str | None = None
) -> ChatChoice:
    """Write one finished choice."""
    return {
        "index": index,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": None,
        "finish_reason": reason.value,
        "stop_reason": stop_reason,
    }


def chat_completion(
    id: str,  # noqa: A002  # the field's name on the wire
    created: int,
    model: str,
    choices: list[ChatChoice],
    usage: UsageBody,
) -> ChatCompletion:
    """Write a whole response; ``created`` in Unix seconds."""
    return {
        "id": id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "system_fingerprint": None,
        "choices": choices,
        "usage": usage,
    }
