"""``/v1/completions``: what comes in and what goes out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NotRequired, TypedDict

import attrs

from triolet.wire.codec import FieldError, Length, ReadBy, converter, mismatch
from triolet.wire.common import MAX_TOKEN_ID, REFUSED, GenerationFields, TokenId, UsageBody

if TYPE_CHECKING:
    from triolet.core import FinishReason

#: Ids of one prompt. Beyond the context of any model we know how to serve, and read in a
#: quarter of a second.
MAX_PROMPT_IDS = 2**20

_PromptIds = tuple[TokenId, ...]


def _read_prompt(value: object) -> str | tuple[int, ...]:
    if type(value) is not list or not value or type(value[0]) is int:
        return _read_one_prompt(value)
    # Batching clients wrap even a single prompt in an array.
    if type(value[0]) is not str and type(value[0]) is not list:
        raise mismatch("a string or a token id", value[0]).under(0)
    if len(value) > 1:
        raise FieldError("with several prompts is not supported yet: send one per request.")
    try:
        return _read_one_prompt(value[0])
    except FieldError as error:
        raise error.under(0) from None


def _read_one_prompt(value: object) -> str | tuple[int, ...]:
    if type(value) is str:
        if not value:
            raise FieldError("must not be empty.")
        return value
    if type(value) is not list:
        raise mismatch("a string or an array of token ids", value)
    Length(1, MAX_PROMPT_IDS).check(value)
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MAX_TOKEN_ID:
        # Ten times faster than the converter, which then only has to find the error.
        return tuple(value)
    return converter.structure(value, _PromptIds)


@attrs.frozen(kw_only=True)
class CompletionRequest(GenerationFields):
    """The body of a text completion request."""

    #: Text, or token ids. Not in the repr, so that no log line holds it by accident.
    prompt: Annotated[str | tuple[int, ...], ReadBy(_read_prompt)] = attrs.field(repr=False)
    refuses: ClassVar[Mapping[str, tuple[object, ...]]] = MappingProxyType({
        **REFUSED,
        # A count, and 0 asks for the logprobs of the chosen tokens; false is what clients of the
        # chat endpoint send.
        "logprobs": (False,),
        "suffix": ("",),
        "add_special_tokens": (True,),
    })

    @property
    def token_limit(self) -> int | None:
        """The limit of output tokens."""
        return self.max_tokens


class CompletionChunkChoice(TypedDict):
    """One choice in a chunk."""

    index: int
    text: str
    logprobs: None
    finish_reason: str | None
    #: Ours, once the choice has finished: the stop id or stop string that did it.
    stop_reason: NotRequired[int | str | None]


class CompletionChunk(TypedDict):
    """One event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[CompletionChunkChoice]
    usage: NotRequired[UsageBody | None]


class CompletionChoice(TypedDict):
    """One choice of a response that is not streamed."""

    index: int
    text: str
    logprobs: None
    finish_reason: str
    stop_reason: int | str | None


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
class CompletionChunks:
    """Writes the chunks of one streamed response, as :class:`~triolet.wire.chat.ChatChunks`."""

    id: str
    #: Unix seconds.
    created: int
    model: str
    #: Every chunk has a ``usage`` then, ``null`` but in the last one.
    include_usage: bool = False

    def text(
        self,
        index: int,
        text: str,
        *,
        first: bool = False,  # noqa: ARG002  # one shape for both endpoints: no role here
        running: UsageBody | None = None,
    ) -> CompletionChunk:
        """Write new text of a choice."""
        return self._chunk(
            [{"index": index, "text": text, "logprobs": None, "finish_reason": None}], running
        )

    def finish(
        self,
        index: int,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        *,
        text: str = "",
        first: bool = False,  # noqa: ARG002  # as above
        running: UsageBody | None = None,
    ) -> CompletionChunk:
        """Write the end of a choice, with its last text where there is some."""
        choice: CompletionChunkChoice = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": reason.value,
            "stop_reason": stop_reason,
        }
        return self._chunk([choice], running)

    def usage(self, usage: UsageBody) -> CompletionChunk:
        """Write the totals: the last chunk, and the only one without choices."""
        return self._chunk([], usage)

    def _chunk(
        self, choices: list[CompletionChunkChoice], usage: UsageBody | None
    ) -> CompletionChunk:
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


def completion_choice(
    index: int, text: str, reason: FinishReason, stop_reason: int | str | None = None
) -> CompletionChoice:
    """Write one finished choice."""
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": reason.value,
        "stop_reason": stop_reason,
    }


def completion(
    id: str,  # noqa: A002  # the field's name on the wire
    created: int,
    model: str,
    choices: list[CompletionChoice],
    usage: UsageBody,
) -> Completion:
    """Write a whole response; ``created`` in Unix seconds."""
    return {
        "id": id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "system_fingerprint": None,
        "choices": choices,
        "usage": usage,
    }
