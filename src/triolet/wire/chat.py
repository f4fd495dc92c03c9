"""``/v1/chat/completions``: what comes in. What goes out is in :mod:`triolet.wire.chat_reply`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

import attrs

from triolet.errors import InvalidRequestError
from triolet.wire.codec import (
    FieldError,
    Length,
    ReadBy,
    converter,
    described,
    encode,
    mismatch,
    read_object,
)
from triolet.wire.common import REFUSED, GenerationFields, Label, Metadata
from triolet.wire.sampling import Count, TokenLimit

#: Twice OpenAI's limit. Reading so many takes the event loop some 20 ms.
MAX_MESSAGES = 4096
#: Text parts of one message; a client that sends a document in lines stays well below.
MAX_PARTS = 1024
#: OpenAI's limit of a participant's name.
MAX_PARTICIPANT_CHARACTERS = 64
#: Parts are separate pieces of text: without a separator the last word of one and the first word
#: of the next would become one word. vLLM and llama.cpp use the same.
PART_SEPARATOR = "\n"
#: ``chat_template_kwargs``, as JSON: switches and a few words for a template, no documents.
MAX_TEMPLATE_KWARGS_BYTES = 16 * 1024

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


def _read_template_kwargs(value: object) -> Mapping[str, object]:
    kwargs = read_object(value)
    try:
        size = len(encode(kwargs))
    except TypeError:  # the writer's depth ends before the reader's
        raise FieldError("is nested too deeply.") from None
    if size > MAX_TEMPLATE_KWARGS_BYTES:
        raise FieldError(f"must have at most {MAX_TEMPLATE_KWARGS_BYTES} bytes, not {size}.")
    for name in kwargs:
        if not name.isidentifier():
            raise mismatch("an object with names of variables as keys", name)
    return MappingProxyType(kwargs)


Messages = Annotated[tuple[ChatMessage, ...], Length(1, MAX_MESSAGES)]
#: Variables of the chat template, as in ``{"enable_thinking": false}``.
TemplateKwargs = Annotated[Mapping[str, object], ReadBy(_read_template_kwargs)]
NO_KWARGS: Mapping[str, object] = MappingProxyType({})


@attrs.frozen(kw_only=True)
class ChatRequest(GenerationFields):
    """The body of a chat completion request."""

    # Not in the repr, so that no log line holds somebody's prompt by accident.
    messages: Messages = attrs.field(repr=False)
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool = False
    top_logprobs: Count | None = None
    #: ``None`` is the opposite of ``continue_final_message``.
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs = attrs.field(default=NO_KWARGS, repr=False)
    #: Templates write the special tokens themselves.
    add_special_tokens: bool = False
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
        "echo": (False,),
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
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                "`top_logprobs` is only allowed with `logprobs` set to true.",
                param="top_logprobs",
            )

    @property
    def output_logprobs(self) -> int | None:
        """How many of the most likely tokens to report with each output token, if any."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """The limit of output tokens, under whichever of its names it came."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
