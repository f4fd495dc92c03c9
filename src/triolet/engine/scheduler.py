"""Which tokens the next step computes, and what its result means. Pure.

Rules
-----

1.  ``plan()`` gives a step, ``apply()`` or ``fail()`` takes its result; one step at a time.
    Everything else may be called at any moment, between the two as well.
2.  Age is the order of ``add()`` and never changes. Older goes first wherever it matters.
3.  A running sequence holds one row, and the blocks of its known tokens. Both are counted:
    no row, no block, no run.
4.  One token budget per step. Decodes (one token left to compute) come first, then prefills
    under way, then admissions. A prefill that does not fit is cut and goes on in the next
    step; only its last chunk samples.
5.  Admission is first in, first out: nobody overtakes a head that does not fit. It takes the
    blocks of all tokens known so far, and leaves one free for each sequence that runs, so
    that the next decode does not throw out who just came in.
6.  A decode that needs a block takes a free one, else preempts a paused sequence (the
    youngest first), else the youngest that is younger than itself, else it waits, keeping what
    it has. An admission takes free or paused ones only. So whoever is the oldest can take
    from everyone, and is in every plan until it ends.
7.  A preempted sequence gives up its row, its blocks and its computed KV, keeps its output,
    and goes to the front of the queue, or is parked if it is paused. Later it computes prompt
    and output again.
8.  A paused sequence is never planned. It keeps its row and blocks until someone needs them.
    Resumed without them, it goes to the front of the queue.
9.  An abort frees at once, unless the step under way computes that sequence: then in
    ``apply()``, since the step still writes to those blocks. Its sampled token is dropped.
10. A sequence ends in ``apply()``: end-of-sequence token (unless ``ignore_eos``), stop id,
    ``max_tokens`` or ``max_model_len``, in this order.

Rule 6 cannot deadlock, as the pool holds one sequence of ``max_model_len`` and the budget one
token per row; both are checked at construction.
"""

from __future__ import annotations

from collections import OrderedDict
from operator import attrgetter
from typing import TYPE_CHECKING

import attrs

from triolet.core import EngineStatistics, RequestId, TokenOutput
from triolet.engine.blocks import BlockPool
from triolet.engine.plan import Chunk, StepPlan
from triolet.engine.sequence import Sequence, SequenceStatus
from triolet.errors import ConfigError, ContextLengthError, EngineError, InvalidRequestError

if TYPE_CHECKING:
    from collections import abc

    from triolet.core import EngineRequest

_arrival = attrgetter("arrival")


@attrs.define(eq=False)
class Scheduler:
    """Continuous batching over a pool of KV blocks; the module says by which rules.

    ``max_num_seqs`` is the number of rows, ``max_num_batched_tokens`` the budget of a step,
    ``max_model_len`` the most tokens one sequence may have, prompt and output together.

    Raises:
        ConfigError: With these numbers a request could wait for ever.
    """

    pool: BlockPool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int]

    # Every sequence held, and which of three places it stands in.
    _sequences: dict[RequestId, Sequence] = attrs.field(factory=dict, init=False, repr=False)
    # Ordered dicts: both ends and any middle are O(1), so mass aborts cost no scan.
    _waiting: OrderedDict[RequestId, Sequence] = attrs.field(
        factory=OrderedDict, init=False, repr=False
    )
    _parked: dict[RequestId, Sequence] = attrs.field(factory=dict, init=False, repr=False)
    _running: dict[RequestId, Sequence] = attrs.field(factory=dict, init=False, repr=False)

    _free_rows: list[int] = attrs.field(init=False, repr=False)
    _plan: StepPlan | None = attrs.field(default=None, init=False, repr=False)
    # Ids of the step under way.
    _in_flight: frozenset[RequestId] = attrs.field(default=frozenset(), init=False, repr=False)
    _arrivals: int = attrs.field(default=0, init=False)
    _steps: int = attrs.field(default=0, init=False)
    _preemptions: int = attrs.field(default=0, init=False)
    _late_aborts: int = attrs.field(default=0, init=False)
    _prompt_tokens: int = attrs.field(default=0, init=False)
    _output_tokens: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_model_len < 2:  # noqa: PLR2004 - one in, one out
            raise ConfigError("max_num_seqs must be at least 1, and max_model_len at least 2.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), so that every sequence gets its token."
            )
        needed = self.pool.blocks_for(self.max_model_len)
        if self.pool.total_blocks < needed:
            raise ConfigError(
                f"The KV pool has {self.pool.total_blocks} blocks of {self.pool.block_size} "
                f"tokens, but one request of max_model_len ({self.max_model_len}) needs {needed}. "
                "Give the pool more memory or lower max_model_len."
            )
        self._free_rows = list(range(self.max_num_seqs - 1, -1, -1))

    # What comes in

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: The prompt is empty.
            ContextLengthError: The prompt leaves no room for an output token.
            EngineError: The id is held already. Ids are the caller's to keep unique.
        """
        if not request.prompt_ids:
            raise InvalidRequestError("The prompt has no tokens.")
        if len(request.prompt_ids) >= self.max_model_len:
            raise ContextLengthError(
                f"The prompt has {len(request.prompt_ids)} tokens; the model takes "
                f"{self.max_model_len} tokens, prompt and output together."
            )
        if request.id in self._sequences:
            raise EngineError(f"Request id {request.id!r} was added twice.")
        sequence = Sequence(request, self._arrivals)
        self._arrivals += 1
        self._sequences[request.id] = self._waiting[request.id] = sequence

    def abort(self, request_id: RequestId) -> bool:
        """Drop a request; ``False``, and counted, where there is nothing to drop any more."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.status is SequenceStatus.DOOMED:
            self._late_aborts += 1
            return False
        if request_id in self._in_flight:
            sequence.status = SequenceStatus.DOOMED
        else:
            self._end(sequence)
        return True

    def pause(self, request_id: RequestId) -> bool:
        """Plan no token of this request until resumed; ``False`` where that changes nothing."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.paused or sequence.status is SequenceStatus.DOOMED:
            return False
        sequence.paused = True
        if self._waiting.pop(request_id, None) is not None:
            self._parked[request_id] = sequence
        return True

    def resume(self, request_id: RequestId) -> bool:
        """Undo :meth:`pause`; ``False`` where that changes nothing."""
        sequence = self._sequences.get(request_id)
        if sequence is None or not sequence.paused or sequence.status is SequenceStatus.DOOMED:
            return False
        sequence.paused = False
        if self._parked.pop(request_id, None) is not None:
            self._to_front(sequence)
        return True

    # The step

    @property
    def has_work(self) -> bool:
        """Whether :meth:`plan` would give a step."""
        return bool(self._waiting) or any(not s.paused for s in self._running.values())

    def plan(self) -> StepPlan | None:
        """The next step, or ``None`` where nothing can be computed.

        Raises:
            EngineError: The step before is still under way.
        """
        if self._plan is not None:
            raise EngineError("A step was planned while another was under way.")
        by_age = sorted(self._running.values(), key=_arrival)
        active = [s for s in by_age if not s.paused]
        paused = [s for s in by_age if s.paused]
        # Growing shortens both lists by whom it preempts, so it comes before the prefills.
        turn = self._grow_decodes(active, paused)
        turn += [s for s in active if s.remaining > 1]

        budget = self.max_num_batched_tokens
        chunks: list[Chunk] = []
        first_scheduled: list[RequestId] = []
        for sequence in turn:
            if budget == 0:
                break
            chunks.append(sequence.chunk(budget, self.pool.block_size))
            budget -= len(chunks[-1].token_ids)
        active_count = len(active)
        while budget > 0 and (admitted := self._admit(active_count, paused)) is not None:
            active_count += 1
            if not admitted.scheduled:
                admitted.scheduled = True
                self._prompt_tokens += len(admitted.request.prompt_ids)
                first_scheduled.append(admitted.id)
            chunks.append(admitted.chunk(budget, self.pool.block_size))
            budget -= len(chunks[-1].token_ids)
        if not chunks:
            return None
        self._plan = StepPlan(tuple(chunks), tuple(first_scheduled))
        self._in_flight = frozenset(chunk.request_id for chunk in chunks)
        return self._plan

    def apply(self, plan: StepPlan, sampled: abc.Sequence[int]) -> list[TokenOutput]:
        """Take the result of a step: one id per chunk that samples, in the order of the chunks.

        Raises:
            EngineError: Not the step under way, or not that many ids; nothing has changed then.
        """
        self._expect(plan)
        if len(sampled) != plan.samples:
            raise EngineError(f"A step that samples {plan.samples} ids gave {len(sampled)}.")
        self._step_over()
        ids = iter(sampled)
        outputs: list[TokenOutput] = []
        for chunk in plan.chunks:
            token = next(ids) if chunk.samples else None
            sequence = self._sequences[chunk.request_id]
            if sequence.status is SequenceStatus.DOOMED:
                self._end(sequence)
                continue
            sequence.computed += len(chunk.token_ids)
            if token is not None:
                outputs.append(sequence.accept(token, self.eos_token_ids, self.max_model_len))
                self._output_tokens += 1
                if outputs[-1].finish is not None:
                    self._end(sequence)
        return outputs

    def fail(self, plan: StepPlan) -> list[RequestId]:
        """Take it that a step failed and all KV is lost.

        Drops its requests, returns their ids less those aborted meanwhile, preempts all others.

        Raises:
            EngineError: Not the step under way.
        """
        self._expect(plan)
        self._step_over()
        planned = [self._sequences[chunk.request_id] for chunk in plan.chunks]
        dropped = [s.id for s in planned if s.status is not SequenceStatus.DOOMED]
        for sequence in planned:
            self._end(sequence)
        for sequence in sorted(self._running.values(), key=_arrival, reverse=True):
            self._preempt(sequence)
        return dropped

    def statistics(self) -> EngineStatistics:
        """Counts as of now. Each request held is in one of waiting, running and paused."""
        paused = sum(s.paused for s in self._running.values())
        return EngineStatistics(
            steps=self._steps,
            waiting=len(self._waiting),
            running=len(self._running) - paused,
            paused=len(self._parked) + paused,
            used_blocks=self.pool.used_blocks,
            total_blocks=self.pool.total_blocks,
            used_rows=self.max_num_seqs - len(self._free_rows),
            total_rows=self.max_num_seqs,
            preemptions=self._preemptions,
            late_aborts=self._late_aborts,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
        )

    # Planning

    def _grow_decodes(self, active: list[Sequence], paused: list[Sequence]) -> list[Sequence]:
        """The decodes that can run, oldest first. Takes whom it preempts out of the lists."""
        ready = []
        for sequence in active.copy():
            running = sequence.status is SequenceStatus.RUNNING  # not preempted by an older one
            if running and sequence.remaining == 1 and self._grow(sequence, active, paused):
                ready.append(sequence)
        return ready

    def _grow(self, sequence: Sequence, active: list[Sequence], paused: list[Sequence]) -> bool:
        """See to it that the blocks of a decode cover its last token."""
        missing = self.pool.blocks_for(sequence.length) - len(sequence.blocks)
        while (blocks := self.pool.allocate(missing)) is None:
            if paused:
                self._preempt(paused.pop())
            elif active[-1] is not sequence:
                self._preempt(active.pop())
            else:
                return False
        sequence.blocks += tuple(blocks)
        return True

    def _admit(self, active_count: int, paused: list[Sequence]) -> Sequence | None:
        """Give the head of the queue its row and blocks, if they are to be had."""
        if not self._waiting:
            return None
        sequence = next(iter(self._waiting.values()))
        needed = self.pool.blocks_for(sequence.length)
        wanted = needed + active_count
        within_reach = self.pool.free_blocks + sum(len(s.blocks) for s in paused)
        if wanted > within_reach or not (self._free_rows or paused):
            return None
        # Preempted here, they are parked: the head of the queue stays who it is.
        while wanted > self.pool.free_blocks or not self._free_rows:
            self._preempt(paused.pop())
        blocks = self.pool.allocate(needed)
        if blocks is None:
            raise EngineError("The KV pool has fewer free blocks than it counted.")
        del self._waiting[sequence.id]
        sequence.blocks = tuple(blocks)
        sequence.row = self._free_rows.pop()
        sequence.status = SequenceStatus.RUNNING
        self._running[sequence.id] = sequence
        return sequence

    # Consequences

    def _expect(self, plan: StepPlan) -> None:
        if self._plan is not plan:
            raise EngineError("The result of a step that is not under way was handed in.")

    def _step_over(self) -> None:
        self._plan = None
        self._in_flight = frozenset()
        self._steps += 1

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        del self._running[sequence.id]
        sequence.status = SequenceStatus.WAITING
        self._preemptions += 1
        if sequence.paused:
            self._parked[sequence.id] = sequence
        else:
            self._to_front(sequence)

    def _end(self, sequence: Sequence) -> None:
        self._release(sequence)
        del self._sequences[sequence.id]
        for place in (self._waiting, self._parked, self._running):
            place.pop(sequence.id, None)
        sequence.status = SequenceStatus.ENDED

    def _release(self, sequence: Sequence) -> None:
        if sequence.row is None:
            return
        self.pool.free(sequence.blocks)
        self._free_rows.append(sequence.row)
        sequence.blocks = ()
        sequence.row = None
        sequence.computed = 0

    def _to_front(self, sequence: Sequence) -> None:
        self._waiting[sequence.id] = sequence
        self._waiting.move_to_end(sequence.id, last=False)

    # The books

    def check(self) -> None:
        """Hold the state against the rules. O(everything held): for tests and diagnosis.

        Raises:
            EngineError: A rule is broken; the message says which.
        """
        self.pool.check()
        for broken, rule in self._violations():
            if broken:
                raise EngineError(f"The scheduler broke a rule of its own: {rule}.")

    def _violations(self) -> abc.Iterator[tuple[bool, str]]:
        running = self._running.values()
        blocks = [block for s in running for block in s.blocks]
        rows = [s.row for s in running]
        places = [*self._waiting, *self._parked, *self._running]
        yield len(set(blocks)) != len(blocks), "a block has two owners"
        yield not all(map(self.pool.held, blocks)), "a sequence uses a free block"
        yield len(blocks) != self.pool.used_blocks, "a block is held by nobody"
        every_row = [*rows, *self._free_rows]
        yield (
            len(every_row) != self.max_num_seqs or set(every_row) != set(range(self.max_num_seqs)),
            "each row is free or has one owner",
        )
        yield (
            len(places) != len(set(places)) or set(places) != set(self._sequences),
            "each sequence stands in one place",
        )
        yield not self._in_flight <= set(self._running), "a step computes who does not run"
        for s in (*self._waiting.values(), *self._parked.values()):
            yield s.status is not SequenceStatus.WAITING, f"{s.id} waits by place and status"
            yield s.paused != (s.id in self._parked), f"{s.id} is parked iff paused"
        for s in running:
            doomed = s.status is SequenceStatus.DOOMED and s.id in self._in_flight
            yield s.status is not SequenceStatus.RUNNING and not doomed, f"{s.id} runs"
        for s in self._sequences.values():
            yield from s.violations(self.pool.block_size, self.max_model_len)
