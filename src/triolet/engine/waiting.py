"""Who waits, and who of them is next. Nothing about what fits.

Rules
-----

1.  A lower priority goes first, always. Each priority in use is a lane of its own, and the rules
    below are about one lane.
2.  Requests that have begun (a token of theirs was in a step) go before those that have not: their
    clients have results already, and nobody else's turn is due before theirs is over. They stand in
    the order in which they began; who is preempted or resumed goes in front of them.
3.  Of the others, the tenant is next that :mod:`~triolet.engine.fairness` says. Within a tenant it
    is first in, first out, and a request that was paused goes to the front of its tenant's line.
4.  A lane lasts while a request of its priority is held, and so do its tenants' accounts.

All places are ordered sets: both ends and any middle are O(1), so mass aborts cost no scan.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

import attrs

from triolet.engine.fairness import PROMPT_WEIGHT, Account, FairShares
from triolet.engine.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@attrs.define(eq=False)
class _Lane:
    shares: FairShares = attrs.field(factory=FairShares, init=False)
    begun: OrderedDict[Sequence, None] = attrs.field(factory=OrderedDict, init=False)
    #: One for each tenant that waits, and no empty one.
    lines: dict[Account, OrderedDict[Sequence, None]] = attrs.field(factory=dict, init=False)

    @property
    def places(self) -> list[OrderedDict[Sequence, None]]:
        return [self.begun, *self.lines.values()]


@attrs.define(eq=False)
class Waiting:
    """The sequences that wait, and the accounts of all requests held."""

    #: Prompt tokens of requests held that have not begun; once each, whatever their n.
    prompt_tokens: int = attrs.field(default=0, init=False)
    _lanes: dict[int, _Lane] = attrs.field(factory=dict, init=False)
    # Of the lanes where somebody waits, in order.
    _priorities: list[int] = attrs.field(factory=list, init=False)
    _places: dict[Sequence, OrderedDict[Sequence, None]] = attrs.field(factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._places

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in the order of lanes, and of tenants' turns as they stand now."""
        for priority in self._priorities:
            lane = self._lanes[priority]
            yield from lane.begun
            for account in sorted(lane.lines, key=lambda a: (a.counter, a.ticket)):
                yield from lane.lines[account]

    def head(self) -> Sequence | None:
        """Who is next."""
        if not self._priorities:
            return None
        lane = self._lanes[self._priorities[0]]
        place = lane.begun
        if not place:
            account = lane.shares.next()
            place = lane.lines[account] if account else place
        return next(iter(place))

    # Requests

    def open(self, siblings: list[Sequence]) -> None:
        """Take in the choices of a request that is new, at the end of its tenant's line."""
        first = siblings[0]
        lane = self._lanes.get(first.priority)
        if lane is None:
            lane = self._lanes[first.priority] = _Lane()
        account = lane.shares.open(first.request.tenant)
        self.prompt_tokens += first.prompt_length
        for sequence in siblings:
            sequence.account = account
            self._stand(sequence)

    def begin(self, siblings: list[Sequence]) -> None:
        """Note that a request begins, and charge it. Those that wait stay ahead of the others.

        It begins with its first choice, which is seated: what that has to compute is charged.
        """
        first = siblings[0]
        self.prompt_tokens -= first.prompt_length
        first.account.charge(PROMPT_WEIGHT * first.remaining)
        for sequence in siblings:
            waits = sequence in self._places
            self.discard(sequence)
            sequence.begun = True
            if waits:
                self._stand(sequence)

    def close(self, last: Sequence) -> None:
        """Note that a request is over, with its last choice, which does not wait any more."""
        if not last.begun:
            self.prompt_tokens -= last.prompt_length
        shares = self._lanes[last.priority].shares
        shares.close(last.account)
        if not shares.accounts:
            del self._lanes[last.priority]

    # Sequences

    def to_front(self, sequence: Sequence) -> None:
        """Let one wait, before all of its kind: rules 2 and 3."""
        self._stand(sequence)
        self._places[sequence].move_to_end(sequence, last=False)

    def discard(self, sequence: Sequence) -> None:
        """Let one wait no more. No-op where it does not wait."""
        place = self._places.pop(sequence, None)
        if place is None:
            return
        del place[sequence]
        if place:
            return
        lane = self._lanes[sequence.priority]
        if place is not lane.begun:
            del lane.lines[sequence.account]
            lane.shares.rest(sequence.account)
        if not lane.begun and not lane.lines:
            del self._priorities[bisect_left(self._priorities, sequence.priority)]

    def _stand(self, sequence: Sequence) -> None:
        lane = self._lanes[sequence.priority]
        if not lane.begun and not lane.lines:
            insort(self._priorities, sequence.priority)
        if sequence.begun:
            place = lane.begun
        else:
            place = lane.lines.setdefault(sequence.account, OrderedDict())
            lane.shares.wait(sequence.account)
        self._places[sequence] = place
        place[sequence] = None

    def violations(self, requests: Iterable[list[Sequence]]) -> Iterator[tuple[bool, str]]:
        """Rules between two calls of the scheduler, and whether each is broken.

        ``requests`` are the living choices of all requests held.
        """
        held = list(requests)
        stand = [s for lane in self._lanes.values() for p in lane.places for s in p]
        holds = Counter((s.priority, s.request.tenant) for s, *_ in held)
        accounts = {
            (priority, tenant): account
            for priority, lane in self._lanes.items()
            for tenant, account in lane.shares.accounts.items()
        }
        fresh = sum(s.prompt_length for s, *_ in held if not s.begun)
        busy = sorted(p for p, lane in self._lanes.items() if any(lane.places))
        yield Counter(stand) != Counter(self._places.keys()), "who waits stands in one place"
        yield set(self) != set(stand), "who waits is found"
        yield self._priorities != busy, "a lane is busy iff somebody waits in it"
        yield {k: a.holds for k, a in accounts.items()} != holds, "each request is in an account"
        yield self.prompt_tokens != fresh, "prompt tokens that wait are counted"
        for lane in self._lanes.values():
            waits = {a for a in lane.shares.accounts.values() if a.ticket is not None}
            yield waits != set(lane.lines), "a tenant takes part iff a request of its waits"
            yield not all(lane.lines.values()), "no line is empty"
            yield any(not s.begun for s in lane.begun), "who has begun stands with its kind"
            yield (
                any(s.begun or s.account is not a for a, p in lane.lines.items() for s in p),
                ("who has not begun stands in its tenant's line"),
            )
