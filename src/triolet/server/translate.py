"""From the wire's nouns to the engine's: the only place that knows both."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING

import attrs
from starlette.datastructures import Headers

from triolet.core import EngineRequest, RequestId
from triolet.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from triolet.output.logprobs import Spelling
from triolet.runtime.served import Served, TextOptions
from triolet.server.answer import ShownPrompt, Wanted
from triolet.server.sampling import EncodedWords, Policy, sampling_params
from triolet.wire.completions import CompletionRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Scope

    from triolet.core import ModelInfo
    from triolet.prompt.tokenizer import Tokenizer
    from triolet.wire.chat import ChatMessage, ChatRequest
    from triolet.wire.common import GenerationFields
    from triolet.wire.tokenize import TokenizeRequest

#: What rendering a message costs, in characters of text that take as long to tokenize.
CHARACTERS_PER_MESSAGE = 64
#: What a call of the tokenizer costs, in the same coin.
CHARACTERS_PER_CALL = 64
#: How many times shorter a normalisation can make a text: three code points of a decomposed
#: Hangul syllable become one, and there is a margin.
NORMALIZATION_FACTOR = 4
#: Logprobs of all prompts of a request, the likeliest tokens' included, as often as the response
#: repeats them. They come at once, before any text: each takes 120 bytes here and half as many as
#: JSON, 8 and 4 MB in all.
MAX_PROMPT_SCORES = 2**16
#: Logprobs that a response may have that is not streamed, and so is held until its end.
MAX_BODY_SCORES = 2**18
TIMEOUT_HEADER = "X-Request-Timeout"
#: How the OpenAI SDK for Python says for how many seconds of silence it waits.
PATIENCE_HEADER = "x-stainless-read-timeout"
#: More than this is no patience but a mistake, in milliseconds for example.
MAX_PATIENCE_S = 1e6


@attrs.frozen
class Prompt:
    """A tokenized prompt, and its text where a response repeats it."""

    #: Inside the vocabulary: the tokenizer sees to it for text, whoever reads ids checks them.
    ids: tuple[int, ...]
    #: As messages name it: ``prompt[1]``, ``messages``.
    param: str
    echo: str = ""


@attrs.frozen
class OutputLimit:
    """How many output tokens a body asks for, at least 1."""

    #: ``None`` where the body does not say.
    asked: int | None
    #: The field that said it.
    param: str = "max_tokens"
    #: What applies where the body does not say; ``None`` leaves it to the model's generation
    #: config, or means as many as fit.
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


def tokenize(served: Served, text: str, *, add_special_tokens: bool, param: str) -> Prompt:
    """Token ids of a prompt.

    Raises:
        ContextLengthError: The text is too long for the model however it is tokenized, which
            is said without taking the time; ``param`` is at fault.
    """
    longest = served.info.max_model_len * served.longest_token_bytes * NORMALIZATION_FACTOR
    if len(text) > longest:
        raise ContextLengthError(
            f"The prompt has {len(text)} characters, which no tokenization fits into the model's "
            f"context of {served.info.max_model_len} tokens.",
            param=param,
        )
    ids = served.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return Prompt(tuple(ids), param)


def render(tokenizer: Tokenizer, request: ChatRequest | TokenizeRequest) -> str:
    """The prompt text of a chat.

    Raises:
        InvalidRequestError: The template refused the messages or the arguments.
    """
    if not tokenizer.has_chat_template:
        raise InvalidRequestError(
            "This model has no chat template; use /v1/completions.", param="messages"
        )
    opens = request.add_generation_prompt
    return tokenizer.render_chat(
        [message.for_template() for message in request.messages or ()],
        add_generation_prompt=not request.continue_final_message if opens is None else opens,
        continue_final_message=request.continue_final_message,
        template_kwargs=request.chat_template_kwargs,
    )


def encode_words(tokenizer: Tokenizer, fields: GenerationFields) -> EncodedWords:
    """Read stop strings that are special tokens, and bad words, as ids.

    A bad word is banned at the start of a text and, as a word of its own, within one: there it
    has a space before it. Where that makes another token of it, of the same length, it is banned
    too. Where the space is a token beside the word, the first ban finds the word there as well.
    (The rule is vLLM's, so that the same words are banned.)
    """
    special = tokenizer.vocabulary.special_ids
    stops = [tokenizer.encode(stop, add_special_tokens=False) for stop in fields.stop]
    banned: list[tuple[int, ...]] = []
    for word in fields.bad_words:
        bare = word.lstrip() or word
        alone = tokenizer.encode(bare, add_special_tokens=False)
        within = tokenizer.encode(" " + bare, add_special_tokens=False)
        banned += [tuple(alone)] if alone else []
        if alone and len(within) == len(alone) and within[0] != alone[0]:
            banned.append(tuple(within))
    return EncodedWords(
        frozenset(ids[0] for ids in stops if len(ids) == 1 and ids[0] in special), tuple(banned)
    )


def messages_size(messages: Sequence[ChatMessage]) -> int:
    """Characters of text that take as long to tokenize as these messages take to render too."""
    return sum(len(message.content) + CHARACTERS_PER_MESSAGE for message in messages)


def words_size(fields: GenerationFields) -> int:
    """Characters that :func:`encode_words` has to tokenize."""
    calls = len(fields.stop) + 2 * len(fields.bad_words)
    characters = sum(map(len, fields.stop)) + 2 * sum(map(len, fields.bad_words))
    return characters + CHARACTERS_PER_CALL * calls


def engine_requests(
    scope: Scope,
    prompts: Sequence[Prompt],
    fields: ChatRequest | CompletionRequest,
    served: Served,
    *,
    words: EncodedWords,
    limit: OutputLimit,
    policy: Policy,
) -> tuple[EngineRequest, ...]:
    """What the engine gets of a request: one of its own for each prompt.

    Args:
        scope: Its state has the id, unique over the life of the server, and whose request it is.
        prompts: At least one.
        fields: The validated body.
        served: The model.
        words: What :func:`encode_words` read of the body.
        limit: Output tokens at most.
        policy: What the server's settings say.

    Raises:
        InvalidRequestError: A prompt is empty, an id is outside the vocabulary, or fields
            contradict each other.
        ContextLengthError: Prompt and output do not fit into the model's context.
    """
    request_id, tenant = scope["state"]["request_id"], scope["state"].get("tenant", "")
    seed = policy.default_seed if fields.seed is None else fields.seed
    prompt_logprobs = _prompt_logprobs(fields, prompts)
    room = [_max_tokens(prompt, limit, served.info) for prompt in prompts]
    # The same for all prompts but for the two that are set below; checked for the tightest.
    params = sampling_params(
        fields,
        served.info,
        words,
        max_tokens=min(room),
        logprobs=fields.output_logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    requests = [
        EngineRequest(
            id=RequestId(request_id if len(prompts) == 1 else f"{request_id}:{number}"),
            prompt_ids=prompt.ids,
            sampling=attrs.evolve(
                params,
                max_tokens=max_tokens,
                # Prompts without a seed must differ, or one sent twice would be answered twice
                # in the same words.
                seed=secrets.randbits(64) if seed is None else seed,
            ),
            n=fields.n,
            priority=fields.priority,
            tenant=tenant,
            # No tenant's name has a colon, so no salt reaches another tenant's prefixes.
            cache_salt=("" if policy.shared_prefixes else f"{tenant}:") + (fields.cache_salt or ""),
        )
        for number, (prompt, max_tokens) in enumerate(zip(prompts, room, strict=True))
    ]
    _check_body(fields, requests)
    return tuple(requests)


def _check_body(fields: ChatRequest | CompletionRequest, requests: Sequence[EngineRequest]) -> None:
    """Refuse a whole response with more logprobs than the server holds for one."""
    count = fields.output_logprobs
    if fields.stream or count is None:
        return
    numbers = (count + 1) * sum(request.n * request.sampling.max_tokens for request in requests)
    if numbers > MAX_BODY_SCORES:
        raise InvalidRequestError(
            f"The response could have {numbers} log-probabilities, and {MAX_BODY_SCORES} are the "
            "most that is sent in one piece: stream it, or lower `max_tokens`.",
            param="logprobs",
        )


def _echoes(fields: ChatRequest | CompletionRequest) -> bool:
    return isinstance(fields, CompletionRequest) and fields.echo


def _prompt_logprobs(
    fields: ChatRequest | CompletionRequest, prompts: Sequence[Prompt]
) -> int | None:
    """How many of the likeliest tokens to compute with each of the prompts', if any."""
    count, param = fields.prompt_logprobs, "prompt_logprobs"
    echoed = fields.output_logprobs if _echoes(fields) else None
    if echoed is not None and (count is None or echoed > count):
        count, param = echoed, "logprobs"
    if count is None:
        return None
    # Text completions have them with each choice, chats once.
    times = fields.n if isinstance(fields, CompletionRequest) else 1
    numbers = (count + 1) * times * sum(len(prompt.ids) for prompt in prompts)
    if numbers > MAX_PROMPT_SCORES:
        raise InvalidRequestError(
            f"`{param}` asks for {numbers} numbers about the prompt, and {MAX_PROMPT_SCORES} are "
            "the most: ask for fewer, or send a shorter prompt.",
            param=param,
        )
    return count


def _max_tokens(prompt: Prompt, limit: OutputLimit, info: ModelInfo) -> int:
    if not prompt.ids:
        raise InvalidRequestError("The prompt has no tokens.", param=prompt.param)
    room = info.max_model_len - len(prompt.ids)
    if room < (limit.asked or 1):
        raise ContextLengthError(
            f"The model's context is {info.max_model_len} tokens; the prompt has "
            f"{len(prompt.ids)} and {limit.asked or 'at least 1'} more were asked for.",
            param=prompt.param if room < 1 else limit.param,
        )
    if limit.asked:
        return limit.asked
    return min(room, limit.default or int(info.default_sampling.get("max_new_tokens", room)))


def wanted(
    fields: ChatRequest | CompletionRequest, prompts: Sequence[Prompt], served: Served
) -> Wanted:
    """What the client asked to be told."""
    return Wanted(
        prompts=tuple(ShownPrompt(prompt.ids, prompt.echo) for prompt in prompts),
        spelling=Spelling(
            served.tokenizer.vocabulary,
            fields.skip_special_tokens,
            as_ids=fields.return_tokens_as_token_ids,
        ),
        n=fields.n,
        logprobs=fields.output_logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        token_ids=fields.return_token_ids,
        echo=_echoes(fields),
    )


def text_options(fields: GenerationFields) -> TextOptions:
    """What the output path gets of a request."""
    return TextOptions(
        stops=fields.stop,
        include_stop=fields.include_stop_str_in_output,
        skip_special_tokens=fields.skip_special_tokens,
        min_tokens=fields.min_tokens,
    )


def include_usage(fields: GenerationFields) -> bool:
    """Whether a stream ends with the totals."""
    return bool(fields.stream_options and fields.stream_options.include_usage)


def continuous_usage(fields: GenerationFields) -> bool:
    """Whether each chunk has the usage so far."""
    return bool(fields.stream_options and fields.stream_options.continuous_usage_stats)


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
        seconds = _seconds(header)
        if math.isnan(seconds):
            raise InvalidRequestError(
                f"{TIMEOUT_HEADER} must be a positive number of seconds.", param=TIMEOUT_HEADER
            )
        wanted.append(seconds)
    return min(wanted)


def header_timeout_s(scope: Scope) -> float:
    """Seconds the request may take as far as its headers say, before its body is there.

    What makes no sense says nothing yet: :func:`timeout_s` refuses it once the body is read, when
    the connection can go on.
    """
    seconds = _seconds(Headers(scope=scope).get(TIMEOUT_HEADER, ""))
    return math.inf if math.isnan(seconds) else seconds


def patience_s(scope: Scope) -> float:
    """Seconds of silence after which the client gives up, as far as its SDK says so.

    It is a header of the SDK's own, which no user writes: what makes no sense says nothing.
    """
    seconds = _seconds(Headers(scope=scope).get(PATIENCE_HEADER, ""))
    return seconds if seconds <= MAX_PATIENCE_S else math.inf


def _seconds(header: str) -> float:
    """A header's positive number of seconds; not a number where it has none."""
    try:
        seconds = float(header)
    except ValueError:
        return math.nan
    return seconds if 0 < seconds < math.inf else math.nan
