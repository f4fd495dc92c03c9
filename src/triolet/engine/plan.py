"""What one step computes: the scheduler writes it, the runner reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from triolet.core import RequestId, SamplingParams, TokenLogprobs


@attrs.frozen
class Chunk:
    """A run of consecutive tokens of one sequence, computed in one step."""

    request_id: RequestId
    #: The sequence's row in the batch, kept from one step to the next while it runs.
    row: int
    #: The ids to compute, at positions ``start``, ``start + 1``, ... At least one.
    token_ids: tuple[int, ...]
    #: Position of the first id; the KV of all positions before it is in ``blocks``.
    start: int
    #: Block table: position ``p`` lives in ``blocks[p // block_size]``. Covers exactly the
    #: positions up to ``start + len(token_ids)``.
    blocks: tuple[int, ...]
    #: Whether a token is sampled after the last id.
    samples: bool
    sampling: SamplingParams
    #: Index from 0 that the sampled token has, or will have, among the output tokens.
    output_index: int
    #: Which of the request's choices the sequence is.
    choice: int = 0
    #: All ids of the prompt and all output ids so far. The second is the sequence's own list,
    #: lent for the length of the step: whoever wants it longer copies it.
    prompt_ids: tuple[int, ...] = ()
    output_ids: Sequence[int] = ()
    #: Whether the runner reports log-probabilities of the prompt tokens that follow the ids of
    #: this chunk (those at positions ``start + 1`` to ``start + len(token_ids)``, as far as
    #: they belong to the prompt).
    scores_prompt: bool = False

    @property
    def scores(self) -> int:
        """How many prompt tokens the runner reports log-probabilities of."""
        if not self.scores_prompt:
            return 0
        return max(0, min(len(self.token_ids), len(self.prompt_ids) - 1 - self.start))


#: The id of a sample that could not be: the request's own masks leave it no id to choose.
NOTHING_LEFT: Final = -1
#: The id of a sample that could not be: the model computed NaN or infinity for the row.
NOT_FINITE: Final = -2


@attrs.frozen
class Sample:
    """What the runner sampled for one chunk with ``samples``."""

    #: Below the size of the vocabulary. Or :data:`NOTHING_LEFT` or :data:`NOT_FINITE`: the request
    #: cannot go on.
    token_id: int
    #: Where the request asked for them and there is a token.
    logprobs: TokenLogprobs | None = None


@attrs.frozen
class StepSamples:
    """What came of a step."""

    #: One per chunk with ``samples``, in the order of the chunks.
    samples: tuple[Sample, ...]
    #: Per index of a chunk with ``scores_prompt``: one entry per prompt token it predicts.
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = attrs.field(factory=dict)
    #: Requests of whose prompts keys, values or log-probabilities are not finite: they cannot go
    #: on. So what a step has computed of the others can be reused.
    unsound_prompts: frozenset[RequestId] = frozenset()


@attrs.frozen
class BlockCopy:
    """The beginning of a block, in all layers, to where it is needed again."""

    source: int
    target: int
    #: At least one, and less than a block has: ``target`` is written from there on.
    tokens: int


@attrs.frozen
class StepPlan:
    """All chunks of one step, at most one per sequence."""

    chunks: tuple[Chunk, ...]
    #: Requests of which no token was ever scheduled before this step.
    first_scheduled: tuple[RequestId, ...] = ()
    #: Done before any chunk is computed. All sources are read before any target is written, or
    #: one copy is done after the other in this order: the same comes of both.
    copies: tuple[BlockCopy, ...] = ()

    @property
    def samples(self) -> int:
        """How many tokens the step samples: one per chunk with ``samples``."""
        return sum(chunk.samples for chunk in self.chunks)
