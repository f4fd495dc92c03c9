"""Where each sequence stands and what it holds: the scheduler's books. No policy.

Rules
-----

1.  A sequence waits, is parked (it waits while its request is paused) or runs. Only who runs
    holds a row and blocks, and its blocks cover all its known tokens.
2.  The choices of a request have consecutive ages. The scheduler seats them in that order and
    unseats the youngest of them first, so where any of them runs, the oldest one living does. It
    *leads*.
3.  Who is seated behind a leader shares the leader's blocks that the prompt fills, up to the one
    with the prompt's last token, which everyone computes to sample from. Those blocks must be
    computed by then and are never written again.
4.  Who leaves or is unseated gives up its own blocks and its share in the others.
5.  A leader that ends, or is ended, with nobody seated behind it leaves row and blocks to the
    next choice, with what is computed of the prompt, if that one needs no more: else a prompt
    would be computed again just because its first choices were short. Not so where it would write
    to a block that others share; it has to find the rest in the index when its turn comes.
6.  Where the pool has an index, a block becomes known as soon as it is full and computed, prompt
    and output alike. If another with the same content is known already, that one takes its place.
    The last one, that is not full, becomes known when its owner leaves or is unseated.
7.  Who is seated shares all blocks known that its tokens begin with, but computes its last token;
    and where a block known begins like its next tokens, it gets a copy of that part. Who has to
    score its prompt computes it all.
8.  A block is written by its one owner, and not any more once it is full. So what is shared is
    not written.

:meth:`Roster.check` holds the books against all of these.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

import attrs

from triolet.core import RequestId
from triolet.engine.blocks import BlockPool
from triolet.engine.plan import BlockCopy
from triolet.engine.prefix import Place
from triolet.engine.sequence import Sequence, SequenceStatus
from triolet.engine.waiting import Waiting
from triolet.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


@attrs.frozen(eq=False)
class Share:
    """What one that waits need not compute. It owns these blocks from now on."""

    blocks: tuple[int, ...] = ()
    #: Of the first of them, where the index has them.
    places: list[Place] = attrs.field(factory=list)
    #: The block behind them is copied up to here from another.
    copied: int = 0
    source: int = -1


@attrs.define(eq=False)
class Roster:
    """The sequences of all requests held. Read its books freely; change them by its methods."""

    pool: BlockPool
    total_rows: int
    #: The living choices of each request, the oldest first.
    requests: dict[RequestId, list[Sequence]] = attrs.field(factory=dict, init=False)
    waiting: Waiting = attrs.field(factory=Waiting, init=False)
    parked: dict[Sequence, None] = attrs.field(factory=dict, init=False)
    running: dict[Sequence, None] = attrs.field(factory=dict, init=False)
    free_rows: list[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.free_rows = list(range(self.total_rows - 1, -1, -1))

    # Questions

    def leader(self, sequence: Sequence) -> Sequence | None:
        """The oldest living choice of the same request, if it runs."""
        oldest = self.requests[sequence.id][0]
        return None if oldest.row is None else oldest

    def shareable(self, sequence: Sequence) -> int:
        """How many blocks of its prompt the choices of a request share."""
        return (sequence.prompt_length - 1) // self.pool.block_size

    def missing(self, sequence: Sequence, share: Share | None = None) -> int:
        """How many free blocks it takes to seat a sequence; without a share, by its leader."""
        if share is not None:
            shared = len(share.blocks)
        else:
            shared = 0 if self.leader(sequence) is None else self.shareable(sequence)
        return self.pool.blocks_for(sequence.length) - shared

    def ready(self, sequence: Sequence) -> bool:
        """Whether nothing it would share is still to be computed."""
        leader = self.leader(sequence)
        return leader is None or leader.computed >= self.shareable(leader) * self.pool.block_size

    def reclaimable(self, sequences: Collection[Sequence]) -> int:
        """How many blocks come free if these are unseated.

        O(their blocks): to be asked where so many can be enough at all.
        """
        shares = Counter(chain.from_iterable(s.blocks for s in sequences))
        return sum(self.pool.owners(block) == count for block, count in shares.items())

    def within_reach(self, blocks: int, paused: Collection[Sequence]) -> bool:
        """Whether so many are free, or would be without those paused."""
        missing = blocks - self.pool.free_blocks
        return missing <= 0 or (
            missing <= sum(len(s.blocks) for s in paused) and missing <= self.reclaimable(paused)
        )

    # Moves

    def enter(self, sequences: list[Sequence]) -> None:
        """Take in the choices of a request: they wait."""
        self.requests[sequences[0].id] = sequences
        self.waiting.open(sequences)

    def share(self, sequence: Sequence) -> Share:
        """Take for one that waits what it need not compute; rules 3 and 7.

        It is to be seated with it, or to give it back with :meth:`unshare`.
        """
        leader, index = self.leader(sequence), self.pool.index
        led = 0 if leader is None else self.shareable(sequence)
        blocks = () if leader is None else leader.blocks[:led]
        places = [] if leader is None else leader.places[:led]
        source, copied = None, 0
        if index is not None and not sequence.scores_prompt:
            salt, ids = sequence.request.cache_salt, sequence.token_ids(0, sequence.length)
            path = index.match(salt, ids)
            known = tuple(place.block for place in path)
            if known[:led] == blocks:
                blocks, places = known, path
                source, copied = index.fork(salt, path, ids)
        self.pool.share(blocks)
        return Share(blocks, places, copied, -1 if source is None else source.block)

    def unshare(self, share: Share | None) -> None:
        """Undo :meth:`share`. No-op without one."""
        if share is not None:
            self.pool.free(share.blocks)

    def seat(self, sequence: Sequence, share: Share) -> list[BlockCopy]:
        """Give one that waits a row, and blocks besides those it shares.

        Returns:
            What the next step has to copy for it before it computes anything.

        Raises:
            EngineError: There is no row or too few blocks. Whoever asks has counted them.
        """
        size = self.pool.block_size
        own = self.pool.allocate(self.missing(sequence, share))
        if own is None or not self.free_rows:
            raise EngineError("A sequence was admitted without the row or the KV blocks for it.")
        computed = len(share.blocks) * size + share.copied
        self._run(sequence, share.blocks + tuple(own), computed, share.places)
        return [BlockCopy(share.source, own[0], share.copied)] if share.copied else []

    def learn(self, sequence: Sequence) -> None:
        """Make known what a sequence has computed: rule 6."""
        places, size = sequence.places, self.pool.block_size
        if not self._teaches(sequence):
            return
        while (len(places) + 1) * size <= sequence.computed:
            at = len(places)
            ids = sequence.token_ids(at * size, (at + 1) * size)
            last, block = places[-1] if places else None, sequence.blocks[at]
            place = self.pool.enter(sequence.request.cache_salt, last, ids, block)
            if place.block != block:
                blocks = sequence.blocks
                sequence.blocks = (*blocks[:at], place.block, *blocks[at + 1 :])
            places.append(place)

    def _leave(self, sequence: Sequence) -> None:
        """Make known all that it has computed; rule 6. It writes to its blocks no more."""
        self.learn(sequence)
        places, index = sequence.places, self.pool.index
        start = len(places) * self.pool.block_size
        if index is None or not self._teaches(sequence) or sequence.computed - start < index.least:
            return
        block = sequence.blocks[len(places)]
        if self.pool.owners(block) == 1:
            ids = sequence.token_ids(start, sequence.computed)
            index.enter(sequence.request.cache_salt, places[-1] if places else None, ids, block)

    def _teaches(self, sequence: Sequence) -> bool:
        """Whether what it computes becomes known: not so once its path was cut."""
        places = sequence.places
        cut = not sequence.sound or (places and not places[-1].alive)
        return self.pool.index is not None and not cut

    def unlearn(self, request_id: RequestId) -> None:
        """Make unknown what a request has computed, but not what it has found."""
        for sequence in self.requests[request_id]:
            sequence.sound = False
            own = sequence.places[sequence.found :]
            if own and own[0].alive:
                self.pool.forget(own[0])

    def unseat(self, sequence: Sequence) -> None:
        """Take row and blocks from one that runs; it waits in front of the queue, or is parked."""
        self._release(sequence)
        del self.running[sequence]
        sequence.status = SequenceStatus.WAITING
        if sequence.paused:
            self.parked[sequence] = None
        else:
            self.waiting.to_front(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Remove one whose siblings go on; by rule 5 the next may take its place."""
        older, *rest = self.requests[sequence.id]
        heir = None
        if rest and older is sequence and sequence.row is not None and rest[0].row is None:
            heir = rest[0]
            # The step in which it was ended computed more than is known yet.
            self.learn(sequence)
        needed = 0 if heir is None else self.pool.blocks_for(heir.length)
        blocks = sequence.blocks[:needed]
        # Of the prompt it need compute but the last token, and no block is known that it writes to.
        computed = min(sequence.computed, sequence.prompt_length - 1)
        begins = computed // self.pool.block_size
        alone = all(self.pool.owners(block) == 1 for block in blocks[begins:])
        if heir is None or len(blocks) < needed or not alone:
            self.remove(sequence)
            return
        places, written = sequence.places[:begins], sequence.places[begins:]
        if written and written[0].alive:
            self.pool.forget(written[0])
        self.pool.share(blocks)
        self.remove(sequence)
        self.parked.pop(heir, None)
        self._run(heir, blocks, computed, places)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free what it holds."""
        self._release(sequence)
        self.waiting.discard(sequence)
        self.parked.pop(sequence, None)
        self.running.pop(sequence, None)
        sequence.status = SequenceStatus.ENDED
        siblings = self.requests[sequence.id]
        siblings.remove(sequence)
        if not siblings:
            del self.requests[sequence.id]
            self.waiting.close(sequence)

    def pause(self, request_id: RequestId) -> None:
        """Mark all choices of a request as paused, and park those that wait."""
        for sequence in self.requests[request_id]:
            sequence.paused = True
            if sequence in self.waiting:
                self.waiting.discard(sequence)
                self.parked[sequence] = None

    def resume(self, request_id: RequestId) -> None:
        """Undo :meth:`pause`; those parked wait in front, in order."""
        for sequence in reversed(self.requests[request_id]):
            sequence.paused = False
            if sequence in self.parked:
                del self.parked[sequence]
                self.waiting.to_front(sequence)

    def _run(
        self, sequence: Sequence, blocks: tuple[int, ...], computed: int, places: list[Place]
    ) -> None:
        self.waiting.discard(sequence)
        sequence.row = self.free_rows.pop()
        sequence.blocks = blocks
        sequence.computed = computed
        sequence.places, sequence.found = places, len(places)
        sequence.status = SequenceStatus.RUNNING
        self.running[sequence] = None

    def _release(self, sequence: Sequence) -> None:
        if sequence.row is None:
            return
        self._leave(sequence)
        self.pool.free(sequence.blocks)
        self.free_rows.append(sequence.row)
        sequence.blocks = ()
        sequence.row = None
        sequence.computed = 0
        sequence.places = []
        sequence.prompt_logprobs.clear()

    # The books

    def check(self, in_flight: Collection[Sequence], max_length: int) -> None:
        """Hold the books against the rules. O(everything held): for tests and diagnosis.

        Raises:
            EngineError: A rule is broken; the message says which.
        """
        self.pool.check()
        for broken, rule in self._violations(in_flight, max_length):
            if broken:
                raise EngineError(f"The scheduler broke a rule of its own: {rule}.")

    def _violations(
        self, in_flight: Collection[Sequence], max_length: int
    ) -> Iterator[tuple[bool, str]]:
        held = Counter(block for s in self.running for block in s.blocks)
        owners = {block: self.pool.owners(block) for block in range(self.pool.total_blocks)}
        places = [*self.waiting, *self.parked, *self.running]
        every_row = [*(s.row for s in self.running), *self.free_rows]
        yield (
            any(owners[b] < held[b] for b in owners),
            "a sequence uses a block that is not its own",
        )
        yield any(owners[b] > held[b] for b in owners), "a block is held by nobody"
        yield (
            sorted(map(repr, every_row)) != sorted(map(repr, range(self.total_rows))),
            ("each row is free or has one owner"),
        )
        living = {s for siblings in self.requests.values() for s in siblings}
        yield len(places) != len(living) or set(places) != living, "each stands in one place"
        yield not set(in_flight) <= set(self.running), "a step computes who does not run"
        for s in (*self.waiting, *self.parked):
            yield s.status is not SequenceStatus.WAITING, f"{s.id} waits by place and status"
            yield s.paused != (s in self.parked), f"{s.id} is parked iff paused"
        for s in self.running:
            doomed = s.status is SequenceStatus.DOOMED and s in in_flight
            yield s.status is not SequenceStatus.RUNNING and not doomed, f"{s.id} runs"
        yield from self.waiting.violations(self.requests.values())
        for siblings in self.requests.values():
            yield from self._family_violations(siblings)
            for s in siblings:
                yield from s.violations(self.pool.block_size, max_length)

    def _family_violations(self, siblings: list[Sequence]) -> Iterator[tuple[bool, str]]:
        name, leader = siblings[0].id, siblings[0]
        shared = self.shareable(leader)
        seated = [s for s in siblings if s.row is not None]
        yield siblings != sorted(siblings, key=lambda s: s.arrival), f"{name} is kept by age"
        yield siblings[: len(seated)] != seated, f"{name} runs its older choices first"
        yield len({s.paused for s in siblings}) != 1, f"{name} is paused as one"
        yield len({s.begun for s in siblings}) != 1, f"{name} begins as one"
        for s in seated:
            yield s.blocks[:shared] != leader.blocks[:shared], f"{name} shares its prompt's blocks"
            yield (
                any(self.pool.owners(b) < len(seated) for b in s.blocks[:shared]),
                (f"{name} shares its prompt's blocks with all its choices"),
            )
            written = s.blocks[s.computed // self.pool.block_size :]
            yield (
                any(self.pool.owners(b) != 1 for b in written),
                (f"{name} shares no block that is written"),
            )
            yield (
                self.pool.index is not None and any(b in self.pool.index for b in written),
                (f"{name} writes to no block that is known"),
            )
            yield (
                len(seated) > 1 and s.computed < shared * self.pool.block_size,
                (f"{name} shares what is computed"),
            )
