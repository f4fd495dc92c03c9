"""The nouns that every layer shares. Knows no layer above it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
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


@attrs.frozen
class EngineRequest:
    """One request as the engine sees it: token ids in, no text."""

    id: RequestId
    #: At least one id, all inside the vocabulary.
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


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
    """The bytes of each token id: what detokenization needs and all it needs.

    ``token_bytes[i]`` are the bytes that id ``i`` adds to the text, independent of its
    neighbours; ``None`` marks a hole in the id space.
    """

    token_bytes: Sequence[bytes | None] = attrs.field(repr=False)
    #: Ids left out of the text under ``skip_special_tokens``.
    special_ids: frozenset[int] = attrs.field(default=frozenset(), repr=False)

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
