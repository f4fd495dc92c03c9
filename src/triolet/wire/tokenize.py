"""``/tokenize`` and ``/detokenize``, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, TypedDict

import attrs

from triolet.errors import InvalidRequestError
from triolet.wire.chat import NO_KWARGS, Messages, TemplateKwargs
from triolet.wire.codec import ReadBy, mismatch
from triolet.wire.common import ModelName
from triolet.wire.completions import MAX_PROMPT_IDS
from triolet.wire.sampling import read_ids

_REFUSED: Mapping[str, tuple[object, ...]] = MappingProxyType({
    "tools": ([],),
    # A template is a program: a request does not bring its own.
    "chat_template": (),
    "mm_processor_kwargs": ({},),
})


def _read_tokens(value: object) -> tuple[int, ...]:
    if type(value) is not list:
        raise mismatch("an array of token ids", value)
    return read_ids(value, MAX_PROMPT_IDS) if value else ()


@attrs.frozen(kw_only=True)
class TokenizeRequest:
    """The body of a tokenize request: a text, or the messages of a chat."""

    model: ModelName | None = None
    prompt: str | None = attrs.field(default=None, repr=False)
    messages: Messages | None = attrs.field(default=None, repr=False)
    #: ``None`` adds them to a text, and nothing to a chat: its template writes them itself.
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    #: ``None`` is the opposite of ``continue_final_message``.
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs = attrs.field(default=NO_KWARGS, repr=False)
    refuses: ClassVar[Mapping[str, tuple[object, ...]]] = _REFUSED

    def __attrs_post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError(
                "Send `prompt` or `messages`, one of them.",
                param="prompt" if self.messages is None else "messages",
            )


@attrs.frozen(kw_only=True)
class DetokenizeRequest:
    """The body of a detokenize request."""

    model: ModelName | None = None
    tokens: Annotated[tuple[int, ...], ReadBy(_read_tokens)] = attrs.field(repr=False)


class Tokenized(TypedDict):
    """The answer to a tokenize request."""

    count: int
    #: Prompt and output tokens of one request together.
    max_model_len: int
    tokens: list[int]
    #: What each token is called in logprobs; ``null`` where it was not asked for.
    token_strs: list[str] | None


class Detokenized(TypedDict):
    """The answer to a detokenize request."""

    #: The text of the tokens, special ones included.
    prompt: str
