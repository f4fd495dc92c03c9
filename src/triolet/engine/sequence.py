"""One request as the scheduler holds it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import attrs

from triolet.core import EngineRequest, FinishReason, RequestId, TokenOutput
from triolet.engine.plan import Chunk
from triolet.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator


class SequenceStatus(enum.Enum):
    """Where a sequence stands. Whether it is paused is a flag apart from this."""

    #: Holds neither row nor blocks.
    WAITING = enum.auto()
    #: Holds a row, and the blocks of all its tokens that are computed.
    RUNNING = enum.auto()
    #: Aborted while a step computes it: holds row and blocks until that step is over.
    DOOMED = enum.auto()
    #: Out of the scheduler; holds nothing.
    ENDED = enum.auto()


@attrs.define(eq=False)
class Sequence:
    """The ids of a request and what it holds of the engine's resources."""

    request: EngineRequest
    #: Rises with every request added; a smaller one is older. Kept through preemption.
    arrival: int
    output_ids: list[int] = attrs.field(factory=list, init=False)
    #: Block table. A tuple, so that a plan shares it instead of copying it each step.
    blocks: tuple[int, ...] = attrs.field(default=(), init=False)
    #: Tokens whose KV is in ``blocks``.
    computed: int = attrs.field(default=0, init=False)
    row: int | None = attrs.field(default=None, init=False)
    status: SequenceStatus = attrs.field(default=SequenceStatus.WAITING, init=False)
    paused: bool = attrs.field(default=False, init=False)
    #: Whether any token of it was ever part of a plan.
    scheduled: bool = attrs.field(default=False, init=False)

    @property
    def id(self) -> RequestId:
        """The id of the request."""
        return self.request.id

    @property
    def length(self) -> int:
        """Prompt and output tokens together."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def remaining(self) -> int:
        """Tokens still to compute before the next one can be sampled."""
        return self.length - self.computed

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """The ids at positions ``start`` up to, not including, ``stop``."""
        prompt = self.request.prompt_ids
        if start >= len(prompt):
            return tuple(self.output_ids[start - len(prompt) : stop - len(prompt)])
        if stop <= len(prompt):
            return prompt[start:stop]
        return prompt[start:] + tuple(self.output_ids[: stop - len(prompt)])

    def chunk(self, budget: int, block_size: int) -> Chunk:
        """The next tokens to compute: all that remain, or ``budget`` of them.

        Raises:
            EngineError: The sequence has no row.
        """
        if self.row is None:
            raise EngineError(f"Request {self.id!r} was planned without a row.")
        start = self.computed
        stop = start + min(self.remaining, budget)
        return Chunk(
            request_id=self.id,
            row=self.row,
            token_ids=self.token_ids(start, stop),
            start=start,
            blocks=self.blocks[: -(-stop // block_size)],
            samples=stop == self.length,
            sampling=self.request.sampling,
            output_index=len(self.output_ids),
        )

    def accept(self, token: int, eos_token_ids: frozenset[int], max_length: int) -> TokenOutput:
        """Append a sampled id, and say whether it ends the sequence and why."""
        self.output_ids.append(token)
        sampling = self.request.sampling
        finish, stop_token_id = None, None
        if token in eos_token_ids and not sampling.ignore_eos:
            finish = FinishReason.STOP
        elif token in sampling.stop_token_ids:
            finish, stop_token_id = FinishReason.STOP, token
        elif len(self.output_ids) >= sampling.max_tokens or self.length >= max_length:
            finish = FinishReason.LENGTH
        return TokenOutput(self.id, (token,), finish, stop_token_id)

    def violations(self, block_size: int, max_length: int) -> Iterator[tuple[bool, str]]:
        """Rules of its own between two calls of the scheduler, and whether each is broken."""
        covered = len(self.blocks) * block_size
        idle = self.status is SequenceStatus.WAITING
        yield idle and self.row is not None, f"{self.id} waits without a row"
        yield idle and bool(self.blocks or self.computed), f"{self.id} waits without KV"
        yield not self.computed < self.length <= max_length, f"{self.id} has a token to go"
        yield covered < self.computed, f"{self.id} has blocks for its computed tokens"
        yield covered >= self.length + block_size, f"{self.id} has no block too many"
