"""One choice of a request as the scheduler holds it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import attrs

from triolet.core import EngineRequest, FinishReason, RequestId, TokenLogprobs, TokenOutput
from triolet.engine.fairness import Account
from triolet.engine.plan import Chunk
from triolet.engine.prefix import Place
from triolet.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triolet.engine.plan import Sample


class SequenceStatus(enum.Enum):
    """Where a sequence stands. Whether it is paused is a flag apart from this."""

    #: Holds neither row nor blocks.
    WAITING = enum.auto()
    #: Holds a row, and the blocks of all its tokens that are computed.
    RUNNING = enum.auto()
    #: Dropped while a step computes it: holds row and blocks until that step is over.
    DOOMED = enum.auto()
    #: Out of the scheduler; holds nothing.
    ENDED = enum.auto()


@attrs.define(eq=False)
class Sequence:
    """The ids of a choice and what it holds of the engine's resources."""

    request: EngineRequest
    #: Rises with every sequence added; a smaller one is older. Kept through preemption.
    arrival: int
    choice: int = 0
    #: Lower goes first. The request's own, or 0 where priorities are not heeded.
    priority: int = attrs.field(default=0, kw_only=True)
    #: Who is charged for it. Set when its request is taken in.
    account: Account = attrs.field(init=False, repr=False)
    output_ids: list[int] = attrs.field(factory=list, init=False)
    #: Block table. A tuple, so that a plan shares it instead of copying it each step.
    blocks: tuple[int, ...] = attrs.field(default=(), init=False)
    #: Tokens whose KV is in ``blocks``.
    computed: int = attrs.field(default=0, init=False)
    #: Of its full blocks, in order, where the prefix index has them.
    places: list[Place] = attrs.field(factory=list, init=False, repr=False)
    #: How many of them were there when it was seated.
    found: int = attrs.field(default=0, init=False)
    #: Whether all that was computed is, as far as one knows, finite.
    sound: bool = attrs.field(default=True, init=False)
    #: Prompt tokens that needed no computing when its request began with it.
    cached_tokens: int = attrs.field(default=0, init=False)
    row: int | None = attrs.field(default=None, init=False)
    status: SequenceStatus = attrs.field(default=SequenceStatus.WAITING, init=False)
    paused: bool = attrs.field(default=False, init=False)
    #: Whether any token of its request was ever part of a plan.
    begun: bool = attrs.field(default=False, init=False)
    #: Of the prompt tokens computed so far, until the first output takes them along.
    prompt_logprobs: list[TokenLogprobs] = attrs.field(factory=list, init=False)

    @property
    def id(self) -> RequestId:
        """The id of the request."""
        return self.request.id

    @property
    def prompt_length(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt_ids)

    @property
    def length(self) -> int:
        """Prompt and output tokens together."""
        return self.prompt_length + len(self.output_ids)

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
            choice=self.choice,
            prompt_ids=self.request.prompt_ids,
            output_ids=self.output_ids,
            scores_prompt=self.scores_prompt and start < self.prompt_length - 1,
        )

    @property
    def scores_prompt(self) -> bool:
        """Whether the request's prompt log-probabilities are still for this sequence to give."""
        asked = self.request.sampling.prompt_logprobs is not None
        return asked and self.choice == 0 and not self.output_ids

    def accept(self, sample: Sample, eos_token_ids: frozenset[int], max_length: int) -> TokenOutput:
        """Append a sampled id, and say whether it ends the sequence and why."""
        token, sampling = sample.token_id, self.request.sampling
        self.output_ids.append(token)
        finish, stop_token_id = None, None
        may_stop = len(self.output_ids) >= sampling.min_tokens
        if may_stop and token in eos_token_ids and not sampling.ignore_eos:
            finish = FinishReason.STOP
        elif may_stop and token in sampling.stop_token_ids:
            finish, stop_token_id = FinishReason.STOP, token
        elif len(self.output_ids) >= sampling.max_tokens or self.length >= max_length:
            finish = FinishReason.LENGTH
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        cached_tokens = 0
        if len(self.output_ids) == 1:
            prompt_logprobs, self.prompt_logprobs = tuple(self.prompt_logprobs), []
            cached_tokens = self.cached_tokens
        return TokenOutput(
            self.id,
            (token,),
            finish,
            stop_token_id,
            choice=self.choice,
            logprobs=() if sample.logprobs is None else (sample.logprobs,),
            prompt_logprobs=prompt_logprobs,
            cached_tokens=cached_tokens,
        )

    def violations(self, block_size: int, max_length: int) -> Iterator[tuple[bool, str]]:
        """Rules of its own between two calls of the scheduler, and whether each is broken."""
        name = f"{self.id}/{self.choice}"
        covered = len(self.blocks) * block_size
        idle = self.status is SequenceStatus.WAITING
        scores = len(self.prompt_logprobs)
        due = min(self.computed, self.prompt_length - 1) if self.scores_prompt else 0
        yield idle and self.row is not None, f"{name} waits without a row"
        yield idle and bool(self.blocks or self.computed or self.places), f"{name} waits without KV"
        yield not self.computed < self.length <= max_length, f"{name} has a token to go"
        yield covered < self.computed, f"{name} has blocks for its computed tokens"
        yield covered >= self.length + block_size, f"{name} has no block too many"
        yield scores != due, f"{name} has scores for the prompt tokens it has computed"
        known = [place.block for place in self.places]
        lives = [place.alive for place in self.places]
        # Of a path that was cut, its own blocks go on being its own.
        cut = lives.index(False) if False in lives else len(lives)
        yield tuple(known[:cut]) != self.blocks[:cut], f"{name} owns the blocks of its path"
        yield len(known) * block_size > self.computed, f"{name} has computed what is known of it"
        yield any(lives[cut:]), f"{name} knows a path from its root"
