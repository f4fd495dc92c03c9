"""From the wire's nouns to the engine's: the only place that knows both."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING

import attrs
from starlette.datastructures import Headers

from triolet.core import EngineRequest, RequestId, SamplingParams
from triolet.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from triolet.runtime.lifecycle import Served, TextOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Scope

    from triolet.wire.common import GenerationFields

#: How many times shorter a normalisation can make a text: three code points of a decomposed
#: Hangul syllable become one, and there is a margin.
NORMALIZATION_FACTOR = 4
TIMEOUT_HEADER = "X-Request-Timeout"


@attrs.frozen
class Prompt:
    """A tokenized prompt, and the stop strings that turned out to be special tokens."""

    ids: tuple[int, ...]
    special_stop_ids: frozenset[int]


@attrs.frozen
class OutputLimit:
    """How many output tokens a body asks for, at least 1."""

    #: ``None`` where the body does not say.
    asked: int | None
    #: The field that said it.
    param: str = "max_tokens"
    #: What applies where the body does not say; ``None`` means as many as fit.
    default: int | None = None


def check_model(name: str, served: Served) -> None:
    """Accept one of the served names.

    Raises:
        ModelNotFoundError: It is none of them.
    """
    if name not in served.info.names:
        names = ", ".join(repr(known) for known in served.info.names)
        raise ModelNotFoundError(
            f"The model {name[:100]!r} is not served here; served: {names}.", param="model"
        )


def tokenize(
    served: Served, text: str, stops: Sequence[str], *, add_special_tokens: bool, param: str
) -> Prompt:
    """Token ids of a prompt; stop strings that are themselves special tokens become stop ids.

    Raises:
        ContextLengthError: The text is too long for the model however it is tokenized, which
            is said without taking the time; ``param`` is at fault.
    """
    tokenizer = served.tokenizer
    longest = served.info.max_model_len * served.longest_token_bytes * NORMALIZATION_FACTOR
    if len(text) > longest:
        raise ContextLengthError(
            f"The prompt has {len(text)} characters, which no tokenization fits into the model's "
            f"context of {served.info.max_model_len} tokens.",
            param=param,
        )
    special = tokenizer.vocabulary.special_ids
    stop_ids = [tokenizer.encode(stop, add_special_tokens=False) for stop in stops]
    return Prompt(
        ids=tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens)),
        special_stop_ids=frozenset(
            ids[0] for ids in stop_ids if len(ids) == 1 and ids[0] in special
        ),
    )


def engine_request(
    request_id: str,
    prompt: Prompt,
    fields: GenerationFields,
    served: Served,
    *,
    limit: OutputLimit,
    default_seed: int | None,
    prompt_param: str,
) -> EngineRequest:
    """What the engine gets of a request.

    Args:
        request_id: Unique over the life of the server.
        prompt: The tokenized prompt.
        fields: The validated sampling fields of the body.
        served: The model.
        limit: Output tokens at most.
        default_seed: Where the body has none; ``None`` draws one.
        prompt_param: The field to blame for the prompt.

    Raises:
        InvalidRequestError: The prompt is empty, or an id is outside the vocabulary.
        ContextLengthError: Prompt and output do not fit into the model's context.
    """
    info = served.info
    if not prompt.ids:
        raise InvalidRequestError("The prompt has no tokens.", param=prompt_param)
    _check_ids(prompt.ids, info.vocab_size, prompt_param)
    _check_ids(fields.stop_token_ids, info.vocab_size, "stop_token_ids")
    room = info.max_model_len - len(prompt.ids)
    if room < (limit.asked or 1):
        raise ContextLengthError(
            f"The model's context is {info.max_model_len} tokens; the prompt has "
            f"{len(prompt.ids)} and {limit.asked or 'at least 1'} more were asked for.",
            param=prompt_param if room < 1 else limit.param,
        )
    seed = default_seed if fields.seed is None else fields.seed
    if seed is None:
        seed = secrets.randbits(64)
    return EngineRequest(
        id=RequestId(request_id),
        prompt_ids=prompt.ids,
        sampling=SamplingParams(
            max_tokens=limit.asked or min(room, limit.default or room),
            temperature=1.0 if fields.temperature is None else fields.temperature,
            top_p=1.0 if fields.top_p is None else fields.top_p,
            top_k=fields.top_k or 0,
            seed=seed,
            ignore_eos=fields.ignore_eos,
            stop_token_ids=frozenset(fields.stop_token_ids) | prompt.special_stop_ids,
        ),
    )


def text_options(fields: GenerationFields) -> TextOptions:
    """What the output path gets of a request."""
    return TextOptions(
        stops=fields.stop,
        include_stop=fields.include_stop_str_in_output,
        skip_special_tokens=fields.skip_special_tokens,
    )


def keepalive_s(fields: GenerationFields) -> float | None:
    """Seconds between keep-alives that the body asks for; ``None`` where it does not say."""
    return None if fields.stream_options is None else fields.stream_options.keepalive


def timeout_s(fields: GenerationFields, scope: Scope, max_timeout_s: float) -> float:
    """Seconds the request may take: the least of body, header and the server's limit.

    Raises:
        InvalidRequestError: The header is not a positive number.
    """
    wanted = [max_timeout_s]
    if fields.timeout is not None:
        wanted.append(fields.timeout)
    header = Headers(scope=scope).get(TIMEOUT_HEADER)
    if header is not None:
        try:
            seconds = float(header)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise InvalidRequestError(
                f"{TIMEOUT_HEADER} must be a positive number of seconds.", param=TIMEOUT_HEADER
            )
        wanted.append(seconds)
    return min(wanted)


def _check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"`{param}[{index}]` is {token_id}, outside the vocabulary of {vocab_size} ids.",
                param=f"{param}[{index}]",
            )
