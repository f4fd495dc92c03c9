"""Which tokens the next step computes, and what its result means. Pure.

Rules
-----

1.  ``plan()`` gives a step, ``apply()`` or ``fail()`` takes its result; one step at a time.
    Everything else may be called at any moment, between the two as well.
2.  A request of n choices is n sequences, added, paused, resumed and aborted as one; a choice may
    be ended alone. A sequence's *rank* is its priority (lower goes first; all are equal where they
    are not heeded), then its age: the order in which sequences were added, by choice within a
    request. It never changes. Of those that run, the first in rank goes first.
3.  A running sequence holds one row, and the blocks of its known tokens. Both are counted:
    no row, no block, no run. Choices share the blocks that their prompt fills, and all share those
    that they find computed (:mod:`~triolet.engine.roster`). A block that nobody holds is free.
4.  One token budget per step. Decodes (one token left to compute) come first; then, by priority,
    prefills under way before admissions. A prefill that does not fit is cut and goes on in the
    next step; only its last chunk samples.
5.  Of those that wait, the head is whom :mod:`~triolet.engine.waiting` says: by priority, then who
    has begun, then whose tenant got the least service, then first in, first out. Nobody overtakes
    a head that does not fit. It takes the blocks of all tokens known so far, and leaves one free
    for each sequence that runs, so that the next decode does not throw out who just came in. A
    choice whose leader still computes their prompt is passed over: one prefill serves them all. It
    keeps its place, and a row and blocks are kept free for it, so whoever comes in from behind
    takes nothing from it but what is left of one step's budget.
6.  A decode that needs a block takes a free one, else preempts a paused sequence (the last in rank
    first), else the last in rank if that is behind itself, else it waits, keeping what it has. An
    admission takes free or paused ones only. So whoever is the first in rank of those that run can
    take from everyone, and is in every plan until it ends or a lower priority comes in.
7.  A preempted sequence gives up its row, its blocks (or its share in them) and its computed
    KV, keeps its output, and waits in front of its priority, or is parked if it is paused. Later
    it computes prompt and output again, less what it can share by then.
8.  A paused sequence is never planned. It keeps its row and blocks until someone needs them.
    Resumed without them, it waits in front of its kind.
9.  An abort, or the end of a choice from outside, frees at once, unless the step under way computes
    that sequence: then in ``apply()``, since the step still writes to those blocks. Its sampled
    token is dropped. The siblings of a choice keep the prompt, as far as it is computed.
10. A sequence ends in ``apply()``: end-of-sequence token (unless ``ignore_eos``), stop id,
    ``max_tokens`` or ``max_model_len``, in this order; the first two not before ``min_tokens``.
11. Choice 0 reports the prompt's log-probabilities, with its first output. It is the oldest of
    its request, so until then it shares nobody's blocks and computes the whole prompt itself.
12. A tenant is charged for what of a prompt is to be computed when its request begins, and for
    each output token (:mod:`~triolet.engine.fairness`). What a preemption makes us compute again
    costs it nothing.
13. A step copies before it computes (:class:`~triolet.engine.plan.StepPlan`), so a block may be
    handed out to be written in the very step that copies from it.
14. A failed step loses all that is known. Numbers that are not finite lose what their request has
    computed, not what it has found.

Nobody of the lowest priority in use waits for ever; where none are heeded, that is everybody. The
pool holds one sequence of ``max_model_len`` and the budget one token per row (both are checked at
construction), and once all others are preempted all blocks are for it alone: so by rule 6 the first
in rank that runs goes on to its end. With nobody running, the head has no leader
to wait for and always fits. A choice passed over waits for a leader that runs and is not paused;
that one becomes the first in rank in time, or is preempted, and then waits before those that wait
for it and leads again. Who has begun comes in before others begin, so these are few, and all end.
Of the others, a tenant that waits is charged no more once what it has begun is over, while each
admission charges somebody: so, tenants being finitely many as API keys are, after finitely many it
has the least counter, and its oldest request is the head.
"""

from __future__ import annotations

from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING

import attrs

from triolet.engine.blocks import BlockPool
from triolet.engine.counts import Counts
from triolet.engine.fairness import OUTPUT_WEIGHT
from triolet.engine.limits import check_limits
from triolet.engine.plan import Chunk, StepPlan
from triolet.engine.roster import Roster
from triolet.engine.sequence import Sequence, SequenceStatus
from triolet.errors import ContextLengthError, EngineError, InvalidRequestError

if TYPE_CHECKING:
    from triolet.core import EngineRequest, EngineStatistics, RequestId, TokenOutput
    from triolet.engine.plan import BlockCopy, StepSamples

_priority = attrgetter("priority")
_rank = attrgetter("priority", "arrival")


@attrs.define(eq=False)
class Scheduler:
    """Continuous batching over a pool of KV blocks; the module says by which rules.

    ``max_num_seqs`` is the number of rows, ``max_num_batched_tokens`` the budget of a step,
    ``max_model_len`` the most tokens one sequence may have, prompt and output together. Without
    ``heed_priority`` all requests have the same.

    Raises:
        ConfigError: With these numbers a request could wait for ever.
    """

    pool: BlockPool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    heed_priority: bool = attrs.field(default=False, kw_only=True)

    _roster: Roster = attrs.field(init=False, repr=False)
    _plan: StepPlan | None = attrs.field(default=None, init=False, repr=False)
    # The step under way: who computes which chunk, in the order of the plan.
    _in_flight: dict[Sequence, Chunk] = attrs.field(factory=dict, init=False, repr=False)
    _arrivals: int = attrs.field(default=0, init=False)
    _counts: Counts = attrs.field(factory=Counts, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        check_limits(
            self.pool,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )
        self._roster = Roster(self.pool, self.max_num_seqs)

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
        if request.id in self._roster.requests:
            raise EngineError(f"Request id {request.id!r} was added twice.")
        age = self._arrivals
        self._arrivals += request.n
        priority = request.priority if self.heed_priority else 0
        self._roster.enter([
            Sequence(request, age + i, choice=i, priority=priority) for i in range(request.n)
        ])

    def abort(self, request_id: RequestId, *, unsound: bool = False) -> bool:
        """Drop a request; ``False``, and counted, where there is nothing to drop any more.

        ``unsound``: its numbers are not finite; rule 14.
        """
        sequences = self._living(request_id)
        if not sequences:
            self._counts.late_aborts += 1
            return False
        if unsound:
            self._roster.unlearn(request_id)
        for sequence in sequences:
            if sequence in self._in_flight:
                sequence.status = SequenceStatus.DOOMED
            else:
                self._roster.remove(sequence)
        return True

    def end_choice(self, request_id: RequestId, choice: int) -> bool:
        """Drop one choice, as :meth:`abort` drops all; its siblings go on.

        With choice 0 ended before its first output, nobody reports the prompt's log-probabilities.
        """
        for sequence in self._living(request_id):
            if sequence.choice == choice:
                if sequence in self._in_flight:
                    sequence.status = SequenceStatus.DOOMED
                else:
                    self._roster.retire(sequence)
                return True
        self._counts.late_aborts += 1
        return False

    def pause(self, request_id: RequestId) -> bool:
        """Plan no token of this request until resumed; ``False`` where that changes nothing."""
        sequences = self._living(request_id)
        if not sequences or sequences[0].paused:
            return False
        self._roster.pause(request_id)
        return True

    def resume(self, request_id: RequestId) -> bool:
        """Undo :meth:`pause`; ``False`` where that changes nothing."""
        sequences = self._living(request_id)
        if not sequences or not sequences[0].paused:
            return False
        self._roster.resume(request_id)
        return True

    def _living(self, request_id: RequestId) -> tuple[Sequence, ...]:
        """The choices of a request, less those already dropped."""
        sequences = self._roster.requests.get(request_id, ())
        return tuple(s for s in sequences if s.status is not SequenceStatus.DOOMED)

    # The step

    @property
    def has_work(self) -> bool:
        """Whether :meth:`plan` would give a step."""
        return bool(self._roster.waiting) or any(not s.paused for s in self._roster.running)

    def plan(self) -> StepPlan | None:
        """The next step, or ``None`` where nothing can be computed.

        Raises:
            EngineError: The step before is still under way.
        """
        if self._plan is not None:
            raise EngineError("A step was planned while another was under way.")
        by_rank = sorted(self._roster.running, key=_rank)
        active = [s for s in by_rank if not s.paused]
        paused = [s for s in by_rank if s.paused]
        # Growing shortens both lists by whom it preempts, so it comes before the prefills.
        turn = self._grow_decodes(active, paused)
        prefills = [s for s in active if s.remaining > 1]
        budget = self.max_num_batched_tokens
        admitted, first, copies = self._admit(budget - len(turn), prefills, len(active), paused)
        # Stable: of one priority, those under way come first.
        turn += sorted(prefills + admitted, key=_priority)

        planned: dict[Sequence, Chunk] = {}
        for sequence in turn:
            if budget == 0:
                break
            planned[sequence] = sequence.chunk(budget, self.pool.block_size)
            budget -= len(planned[sequence].token_ids)
        if not planned:
            return None
        self._in_flight = planned
        self._plan = StepPlan(tuple(planned.values()), tuple(first), tuple(copies))
        return self._plan

    def apply(self, plan: StepPlan, result: StepSamples) -> list[TokenOutput]:
        """Take the result of a step.

        Raises:
            EngineError: Not the step under way, or not one sample for each chunk that samples;
                nothing has changed then.
        """
        self._expect(plan)
        if len(result.samples) != plan.samples:
            raise EngineError(f"A step that samples {plan.samples} ids gave {len(result.samples)}.")
        samples = iter(result.samples)
        outputs: list[TokenOutput] = []
        for index, (sequence, chunk) in enumerate(self._step_over().items()):
            sample = next(samples) if chunk.samples else None
            sequence.computed += len(chunk.token_ids)
            if sequence.status is SequenceStatus.DOOMED:
                self._roster.retire(sequence)
                continue
            if chunk.scores_prompt:
                sequence.prompt_logprobs += result.prompt_logprobs[index]
            if len(chunk.token_ids) > 1 or not sequence.computed % self.pool.block_size:
                self._roster.learn(sequence)
            if sample is not None:
                outputs.append(sequence.accept(sample, self.eos_token_ids, self.max_model_len))
                sequence.account.charge(OUTPUT_WEIGHT)
                self._counts.output_tokens += 1
                if outputs[-1].finish is not None:
                    self._roster.retire(sequence)
        return outputs

    def fail(self, plan: StepPlan) -> list[RequestId]:
        """Take it that a step failed and all KV is lost.

        Drops its requests with all their choices, returns their ids, preempts all others. Who was
        dropped meanwhile is not of the step any more.

        Raises:
            EngineError: Not the step under way.
        """
        self._expect(plan)
        planned = self._step_over()
        dropped = dict.fromkeys(s.id for s in planned if s.status is not SequenceStatus.DOOMED)
        gone = [s for s in planned if s.status is SequenceStatus.DOOMED]
        gone += [s for request_id in dropped for s in self._roster.requests[request_id]]
        for sequence in dict.fromkeys(gone):
            self._roster.remove(sequence)
        for sequence in sorted(self._roster.running, key=_rank, reverse=True):
            self._preempt(sequence)
        self.pool.forget_all()
        return list(dropped)

    def statistics(self) -> EngineStatistics:
        """Counts as of now: sequences, each of them waiting, running or paused.

        A shared block and a request's prompt tokens count once.
        """
        return self._counts.snapshot(self._roster)

    def check(self) -> None:
        """Hold the state against the rules. O(everything held): for tests and diagnosis.

        Raises:
            EngineError: A rule is broken; the message says which.
        """
        self._roster.check(self._in_flight, self.max_model_len)

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
        if not missing:
            return True
        while (blocks := self.pool.allocate(missing)) is None:
            if paused:
                self._preempt(paused.pop())
            elif active[-1] is not sequence:
                self._preempt(active.pop())
            else:
                return False
        sequence.blocks += tuple(blocks)
        return True

    def _admit(
        self, budget: int, prefills: list[Sequence], active: int, paused: list[Sequence]
    ) -> tuple[list[Sequence], list[RequestId], list[BlockCopy]]:
        """Seat whoever comes next until budget, rows or blocks are spent.

        Returns:
            Who came in, the requests that begin thereby, and what is copied for them.
        """
        roster = self._roster
        admitted: list[Sequence] = []
        first: list[RequestId] = []
        copies: list[BlockCopy] = []
        passed: list[Sequence] = []
        # Blocks to leave alone: one for each that runs, and what those passed over will take.
        claimed = active
        ahead = deque(prefills)
        while (sequence := roster.waiting.head()) is not None:
            while ahead and ahead[0].priority <= sequence.priority:
                budget -= ahead.popleft().remaining
            if budget <= 0 or len(passed) >= len(roster.free_rows) + len(paused):
                break
            # Owned from here on, so that nobody who is preempted for it takes it along.
            share = roster.share(sequence) if roster.ready(sequence) else None
            wanted = claimed + roster.missing(sequence, share)
            if not roster.within_reach(wanted, paused):
                roster.unshare(share)
                break
            if share is None:
                roster.waiting.discard(sequence)
                passed.append(sequence)
                claimed = wanted + 1
                continue
            # Preempted here, they are parked: the order of those that wait stays what it is.
            while wanted > self.pool.free_blocks or not roster.free_rows:
                self._preempt(paused.pop())
            copies += roster.seat(sequence, share)
            admitted.append(sequence)
            if not sequence.begun:
                self._begin(sequence)
                first.append(sequence.id)
            budget -= sequence.remaining
            claimed += 1
        for sequence in reversed(passed):
            roster.waiting.to_front(sequence)
        return admitted, first, copies

    def _begin(self, sequence: Sequence) -> None:
        """Note that a request begins with this choice, which is seated."""
        self._roster.waiting.begin(self._roster.requests[sequence.id])
        self._counts.prompt_tokens += sequence.prompt_length
        sequence.cached_tokens = sequence.computed
        if self.pool.index is not None and not sequence.scores_prompt:
            self._counts.prefix_queried_tokens += sequence.prompt_length
            self._counts.prefix_hit_tokens += sequence.computed

    # Consequences

    def _expect(self, plan: StepPlan) -> None:
        if self._plan is not plan:
            raise EngineError("The result of a step that is not under way was handed in.")

    def _step_over(self) -> dict[Sequence, Chunk]:
        planned, self._in_flight = self._in_flight, {}
        self._plan = None
        self._counts.steps += 1
        return planned

    def _preempt(self, sequence: Sequence) -> None:
        self._roster.unseat(sequence)
        self._counts.preemptions += 1
