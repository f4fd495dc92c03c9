"""What the OpenAI endpoints share: limits, generation fields, refused fields, usage, errors.

Every field that OpenAI's API or vLLM's well-known extensions define is in one of three places:

- a field of a request type: supported, or accepted because it cannot change the result;
- the ``refuses`` table of a request type: it would change the result and is not supported yet,
  so it is refused unless it has a value that changes nothing;
- nowhere: unknown, and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, TypedDict

import attrs

from triolet.errors import InvalidRequestError
from triolet.wire.codec import FieldError, Length, ReadBy, Within, mismatch, read_object
from triolet.wire.sampling import (
    AllowedTokenIds,
    BadWords,
    Choices,
    Count,
    LogitBias,
    MinP,
    Penalty,
    RepetitionPenalty,
    Seed,
    Stop,
    StopTokenIds,
    Temperature,
    TokenLimit,
    TopK,
    TopP,
)

if TYPE_CHECKING:
    from triolet.errors import TrioletError

#: Characters of a model name. Hub names end at 96 on each side of the slash; a path may be longer.
MAX_NAME_CHARACTERS = 512
#: Characters of a label that is only carried along (``user``, ``service_tier``, cache keys).
MAX_LABEL_CHARACTERS = 512
#: OpenAI's limits of ``metadata``; it is carried into records, so it must stay small.
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_VALUE_CHARACTERS = 512


def _read_keepalive(value: object) -> float:
    if type(value) is not int and type(value) is not float:
        raise mismatch("a number", value)
    # More often than once a second is a burden that no proxy asks for.
    if value != 0 and value < 1:
        raise FieldError(f"must be 0 or at least 1, not {value}.")
    return float(value)


def _read_metadata(value: object) -> Mapping[str, str]:
    pairs = read_object(value)
    if len(pairs) > MAX_METADATA_PAIRS:
        raise FieldError(f"must have at most {MAX_METADATA_PAIRS} pairs, not {len(pairs)}.")
    checked: dict[str, str] = {}
    for key, item in pairs.items():
        if len(key) > MAX_METADATA_KEY_CHARACTERS:
            raise FieldError(f"must have keys of at most {MAX_METADATA_KEY_CHARACTERS} characters.")
        if type(item) is not str:
            raise mismatch("an object with strings as values", item)
        if len(item) > MAX_METADATA_VALUE_CHARACTERS:
            raise FieldError(
                f"must have values of at most {MAX_METADATA_VALUE_CHARACTERS} characters."
            )
        checked[key] = item
    return MappingProxyType(checked)


ModelName = Annotated[str, Length(1, MAX_NAME_CHARACTERS)]
Label = Annotated[str, Length(0, MAX_LABEL_CHARACTERS)]
#: As vLLM has it: an empty one is a mistake.
CacheSalt = Annotated[str, Length(1, MAX_LABEL_CHARACTERS)]
Metadata = Annotated[Mapping[str, str], ReadBy(_read_metadata)]
#: Seconds; the server's own limit applies where it is lower.
Seconds = Annotated[float, Within(0, low_open=True)]

#: As vLLM has it: lower goes first. 32 bits are what its clients can send.
Priority = Annotated[int, Within(-(2**31), 2**31 - 1)]

#: Seconds; 0 is off.
Keepalive = Annotated[float, ReadBy(_read_keepalive)]

#: Refused on every endpoint: field name to the values that change nothing, beside ``null``.
REFUSED: Mapping[str, tuple[object, ...]] = MappingProxyType({
    # Other ways to search.
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    # Which tokens are chosen.
    # Not in OpenAI's API or vLLM's. It keeps the tokens of typical, not of high, probability,
    # so that every row would have to be sorted, which our sampler never does.
    "typical_p": (1,),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "thinking_token_budget": (),
    # Output of a given form.
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "json_schema": (),
    "grammar": (),
    # What comes with the text.
    "spaces_between_special_tokens": (True,),
    "request_id": (),
    # How the prompt is read, kept and scheduled.
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "store": (False,),
    "moderation": (),
})


@attrs.frozen
class StreamOptions:
    """What a streamed response carries beside the text."""

    #: One more chunk with the token counts, after all choices have finished.
    include_usage: bool = False
    #: The running counts in every chunk.
    continuous_usage_stats: bool = False
    #: Accepted without effect: OpenAI pads chunks against traffic analysis, we do not.
    include_obfuscation: bool = False
    #: Ours. Seconds of silence between keep-alive comments, 0 for none; ``None`` leaves it to
    #: the server.
    keepalive: Keepalive | None = None
    refuses: ClassVar[Mapping[str, tuple[object, ...]]] = MappingProxyType({
        "resume": (),
        "resume_window": (),
    })


@attrs.frozen(kw_only=True)
class GenerationFields:
    """The fields of a request that say who generates text and how, whatever it is prompted with.

    ``None`` stands for a field that was left out where the server or the model has its own
    default.
    """

    model: ModelName
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Choices = 1
    best_of: Choices | None = None
    max_tokens: TokenLimit | None = None
    min_tokens: Count = 0
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = ()
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWords = ()
    seed: Seed | None = None
    stop: Stop = ()
    stop_token_ids: StopTokenIds = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Count | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    timeout: Seconds | None = None
    priority: Priority = 0
    cache_salt: CacheSalt | None = None
    user: Label | None = None

    def __attrs_post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "`stream_options` is only allowed with `stream` set to true.",
                param="stream_options",
            )
        if self.best_of not in {None, self.n}:
            raise InvalidRequestError(
                f"`best_of` must be `n`, which is {self.n}, not {self.best_of}: choices are not "
                "ranked here, all of them are returned.",
                param="best_of",
            )


class PromptTokensDetails(TypedDict):
    """Of the prompt tokens: how many had their keys and values cached."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """Of the completion tokens: how many were reasoning."""

    reasoning_tokens: int


class UsageBody(TypedDict):
    """The ``usage`` of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_body(
    prompt_tokens: int, completion_tokens: int, *, cached_tokens: int = 0, reasoning_tokens: int = 0
) -> UsageBody:
    """Write token counts as OpenAI does; the details are always there."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


class ErrorDetails(TypedDict):
    """What went wrong, in OpenAI's four fields."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of every error response, and the data of an error event in a stream."""

    error: ErrorDetails


def error_body(error: TrioletError) -> ErrorBody:
    """Write an error as OpenAI does."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }
