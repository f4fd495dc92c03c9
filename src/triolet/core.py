"""The nouns that every layer shares. Knows no layer above it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import NewType

import attrs

RequestId = NewType("RequestId", str)


class FinishReason(StrEnum):
    """Why a choice ended by itself: OpenAI's values and no others."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"


class CancelCause(StrEnum):
    """Why a running request was ended from outside. A closed set."""

    DISCONNECT = "disconnect"
    CLIENT_CANCEL = "client_cancel"
    TIMEOUT = "timeout"
    SLOW_CLIENT = "slow_client"
    SHUTDOWN = "shutdown"


@attrs.frozen
class SamplingParams:
    """How the next token of a request is chosen, and what ends it in token ids.

    All values are validated where a request enters (:mod:`triolet.wire`); the engine trusts them.
    """

    #: Output tokens at most, the stop token included; at least 1.
    max_tokens: int
    #: 0 means greedy: the id with the largest logit, the lowest id on a tie.
    temperature: float = 1.0
    #: Keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
    top_p: float = 1.0
    #: Keep the k most likely tokens; 0 keeps all.
    top_k: int = 0
    #: Unsigned 64-bit. Always set: admission draws one where the client gave none.
    seed: int = 0
    #: Go on past the model's end-of-sequence tokens.
    ignore_eos: bool = False
    #: Ids that end the request besides the model's end-of-sequence tokens.
    stop_token_ids: frozenset[int] = frozenset()
    #: Nothing but ``max_tokens`` ends a choice before it has this many output tokens; the ids
    #: that would end it cannot be sampled until then.
    min_tokens: int = 0
    #: Keep tokens at least this likely, as a share of the most likely one's probability.
    min_p: float = 0.0
    #: Divides (or, below 0, multiplies) the logit of every id in prompt and output; 1 is off.
    #: Keskar et al. 2019 (CTRL), section 4.1.
    repetition_penalty: float = 1.0
    #: Taken off the logit of every id in the output, once; 0 is off. OpenAI's definition.
    presence_penalty: float = 0.0
    #: Taken off the logit of every id in the output, once per occurrence; 0 is off.
    frequency_penalty: float = 0.0
    #: Added to the logits of these ids. Pairs, so that the value stays hashable.
    logit_bias: tuple[tuple[int, float], ...] = ()
    #: No other id can be sampled; ``None`` allows all.
    allowed_token_ids: frozenset[int] | None = None
    #: The last id of such a sequence cannot be sampled right after the ids before it.
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    #: Report the log-probability of each output token and of the k most likely ones; ``None``
    #: reports nothing.
    logprobs: int | None = None
    #: The same for the prompt's tokens.
    prompt_logprobs: int | None = None


@attrs.frozen
class EngineRequest:
    """One request as the engine sees it: token ids in, no text."""

    id: RequestId
    #: At least one id, all inside the vocabulary.
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    #: Choices to generate from the one prompt, at least 1.
    n: int = 1
    #: Lower goes first, where the engine is told to heed it.
    priority: int = 0
    #: Whose request it is: tenants that wait get equal shares of the engine. Any string; an
    #: empty one is a tenant like every other.
    tenant: str = ""
    #: Only requests with the same one reuse each other's computed prefixes.
    cache_salt: str = ""


@attrs.frozen
class TokenLogprobs:
    """How likely a token was, and which were most likely, as natural logarithms.

    Of the model's own distribution: before temperature, penalties, masks and cuts.
    """

    token_id: int
    logprob: float
    #: Place of the token among all, from 1.
    rank: int
    #: The most likely ids and their log-probabilities: by probability, ties by id.
    top: tuple[tuple[int, float], ...] = ()


@attrs.frozen
class TokenOutput:
    """What one engine step produced for one choice of one request."""

    request_id: RequestId
    #: Accepted ids in order, the stop token included. May be empty.
    token_ids: tuple[int, ...]
    #: Set with the last output of a choice that the engine itself ended.
    finish: FinishReason | None = None
    #: The id that ended the choice, where it was one of ``stop_token_ids``.
    stop_token_id: int | None = None
    choice: int = 0
    #: One entry per id, where they were asked for; else empty.
    logprobs: tuple[TokenLogprobs, ...] = ()
    #: With the first output of choice 0, where they were asked for: one entry for each prompt
    #: token but the first, which nothing predicts.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    #: With the first output of the choice that began the request: prompt tokens that needed no
    #: computing then.
    cached_tokens: int = 0


@attrs.frozen
class RequestFailure:
    """The engine cannot go on with one request. ``message`` is fit for the client."""

    request_id: RequestId
    message: str


@attrs.frozen
class EngineStatistics:
    """A snapshot of what the engine holds. Counts unless the name says otherwise."""

    steps: int = 0
    waiting: int = 0
    running: int = 0
    paused: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    used_rows: int = 0
    total_rows: int = 0
    preemptions: int = 0
    #: Aborts of requests that were unknown, finished or already aborted: no-ops, but counted.
    late_aborts: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    #: Of requests held that no step has computed anything of yet; once each, whatever their n.
    waiting_prompt_tokens: int = 0
    #: Free blocks that hold what a later request may reuse.
    cached_blocks: int = 0
    #: Prompt tokens of requests that looked for a computed prefix when they began, and of these
    #: the ones that were found. Once each, whatever their n.
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0


@attrs.frozen
class StepResult:
    """All that one engine step has to say. One message per step crosses the thread border."""

    step: int
    outputs: tuple[TokenOutput, ...]
    failures: tuple[RequestFailure, ...] = ()
    #: Requests whose first prompt token was scheduled in this step.
    first_scheduled: tuple[RequestId, ...] = ()
    #: ``time.monotonic_ns`` at the start of the step and when its tokens were sampled.
    started_ns: int = 0
    sampled_ns: int = 0


@attrs.frozen
class Vocabulary:
    """The bytes of each token id: what detokenization needs and, mostly, all it needs.

    ``token_bytes[i]`` are the bytes that id ``i`` adds to the text, independent of its
    neighbours; ``None`` marks a hole in the id space. Where ``decode`` is set, a token's text
    does depend on its neighbours, and its bytes are only its spelling in the vocabulary.
    """

    token_bytes: Sequence[bytes | None] = attrs.field(repr=False)
    #: Ids left out of the text under ``skip_special_tokens``.
    special_ids: frozenset[int] = attrs.field(default=frozenset(), repr=False)
    #: Spaces that decoding takes off the very start of a text, where there are so many.
    leading_spaces: int = 0
    #: The text of a whole sequence of ids, special ones included, for tokenizers whose text is
    #: no sum over tokens. Must be callable while another thread encodes.
    decode: Callable[[Sequence[int]], str] | None = attrs.field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.token_bytes)


@attrs.frozen
class ModelInfo:
    """What the server must know of a loaded model besides its tokenizer."""

    #: Names it is served under; the first one is reported in responses.
    names: tuple[str, ...]
    #: Prompt and output tokens of one request together.
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    #: Unix seconds.
    created: int
    architecture: str = "unknown"
    dtype: str = "float32"
    device: str = "cpu"
    #: What a request means that leaves a field out: the model's own generation config, by the
    #: names that it has there (``temperature``, ``max_new_tokens`` and the like).
    default_sampling: Mapping[str, float] = attrs.field(
        factory=lambda: MappingProxyType({}), eq=False, repr=False
    )
