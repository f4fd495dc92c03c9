"""What one step computes: the scheduler writes it, the runner reads it."""

from __future__ import annotations

import attrs

from triolet.core import RequestId, SamplingParams


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


@attrs.frozen
class StepPlan:
    """All chunks of one step, at most one per sequence."""

    chunks: tuple[Chunk, ...]
    #: Requests of which no token was ever scheduled before this step.
    first_scheduled: tuple[RequestId, ...] = ()

    @property
    def samples(self) -> int:
        """How many tokens the step samples: one per chunk with ``samples``."""
        return sum(chunk.samples for chunk in self.chunks)
