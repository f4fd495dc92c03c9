"""From the fields of a body to how the engine samples: defaults, limits, contradictions.

A value comes from the body, else from the model's generation config, else from OpenAI's
documentation. What only the server's settings or the model can judge is judged here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from triolet.core import SamplingParams
from triolet.errors import InvalidRequestError
from triolet.wire.chat import ChatRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triolet.core import ModelInfo
    from triolet.wire.common import GenerationFields
    from triolet.wire.completions import CompletionRequest


@attrs.frozen(kw_only=True)
class Policy:
    """What the server's settings say of requests."""

    #: Seconds that a request may take; one may ask for less.
    max_timeout_s: float
    #: For requests that bring none; ``None`` draws a new one for each prompt.
    default_seed: int | None
    max_n: int
    max_logprobs: int
    #: Whether the engine heeds `priority`.
    priorities: bool = False
    #: Whether requests of different API keys reuse each other's computed prefixes.
    shared_prefixes: bool = False


@attrs.frozen
class EncodedWords:
    """What of a body the tokenizer had to read for the sampler."""

    #: Stop strings that turned out to be special tokens.
    special_stop_ids: frozenset[int] = frozenset()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()


def check_policy(request: ChatRequest | CompletionRequest, policy: Policy) -> None:
    """Hold a request to the server's own limits.

    Raises:
        InvalidRequestError: One is exceeded; ``param`` is the field.
    """
    param = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
    counts = {
        param: request.output_logprobs,
        "prompt_logprobs": request.prompt_logprobs,
    }
    for param, count in counts.items():
        if count is not None and count > policy.max_logprobs:
            raise _over(param, count, policy.max_logprobs, "--max-logprobs")
    if request.n > policy.max_n:
        raise _over("n", request.n, policy.max_n, "--max-n")
    if request.priority and not policy.priorities:
        raise InvalidRequestError(
            "`priority` must be 0, unless the server runs with --scheduling-policy priority.",
            param="priority",
        )


def _over(param: str, value: int, limit: int, flag: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"`{param}` must be at most {limit}, the server's {flag}, not {value}.", param=param
    )


def sampling_params(
    fields: GenerationFields,
    info: ModelInfo,
    words: EncodedWords,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """How the engine samples for a body; the seed is 0, each prompt gets its own.

    Args:
        fields: The body.
        info: The model, with its defaults.
        words: What the tokenizer read.
        max_tokens: What the body or the room in the context allows.
        logprobs: For the output, as the engine takes them.
        prompt_logprobs: For the prompt.

    Raises:
        InvalidRequestError: An id is outside the vocabulary, or fields contradict each other.
    """
    _check_vocabulary(fields, info.vocab_size)
    if fields.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"`min_tokens` must be at most {max_tokens}, what `max_tokens` or the model's context "
            f"allows, not {fields.min_tokens}.",
            param="min_tokens",
        )
    defaults = info.default_sampling
    stop_token_ids = frozenset(fields.stop_token_ids) | words.special_stop_ids
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=_first(fields.temperature, defaults.get("temperature"), 1.0),
        top_p=_first(fields.top_p, defaults.get("top_p"), 1.0),
        top_k=int(_first(fields.top_k, defaults.get("top_k"), 0)),
        min_p=_first(fields.min_p, defaults.get("min_p"), 0.0),
        repetition_penalty=_first(
            fields.repetition_penalty, defaults.get("repetition_penalty"), 1.0
        ),
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logit_bias=fields.logit_bias,
        allowed_token_ids=fields.allowed_token_ids,
        bad_words_ids=words.bad_words_ids,
        ignore_eos=fields.ignore_eos,
        stop_token_ids=stop_token_ids,
        min_tokens=fields.min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    _check_something_is_left(params, info)
    return params


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _check_vocabulary(fields: GenerationFields, vocab_size: int) -> None:
    check_ids(fields.stop_token_ids, vocab_size, "stop_token_ids")
    for token_id, _ in fields.logit_bias:
        if token_id >= vocab_size:
            raise _outside(f"logit_bias.{token_id}", "is for an id", vocab_size)
    largest = max(fields.allowed_token_ids or (0,))
    if largest >= vocab_size:
        raise _outside("allowed_token_ids", f"has {largest},", vocab_size)


def check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Refuse ids that the model does not have.

    Raises:
        InvalidRequestError: The first of them; ``param`` has its index.
    """
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise _outside(f"{param}[{index}]", f"is {token_id},", vocab_size)


def _outside(param: str, what: str, vocab_size: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"`{param}` {what} outside the vocabulary of {vocab_size} ids.", param=param
    )


def _check_something_is_left(params: SamplingParams, info: ModelInfo) -> None:
    """Refuse what would leave the sampler without a token to choose."""
    if params.allowed_token_ids is None:
        return
    banned = {ids[0] for ids in params.bad_words_ids if len(ids) == 1}
    if params.min_tokens:
        banned |= params.stop_token_ids
        banned |= frozenset() if params.ignore_eos else info.eos_token_ids
    if params.allowed_token_ids <= banned:
        raise InvalidRequestError(
            "`allowed_token_ids` leaves no token to choose: `bad_words` and `min_tokens` ban "
            "all of them.",
            param="allowed_token_ids",
        )
