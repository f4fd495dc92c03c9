"""Whose turn it is among tenants: one counter of service for each. Pure.

Virtual token counters, after Sheng et al., "Fairness in Serving Large Language Models" (OSDI
2024). Service is counted in tokens: those of a prompt that are to be computed when its request
begins, output tokens as they come, at double weight. What the prefix cache has is no service: it
costs nobody a turn. At least one token of a prompt is always computed, so each turn is charged.

Rules
-----

1.  Of the tenants that wait, the one with the least counter is next; of equals, the one that has
    waited longest.
2.  Who starts to wait is lifted to the *floor*: the least counter of those who wait, or, where
    nobody waits, that of whoever stopped last. So nobody saves up time in which it asked for
    nothing. The floor never falls.
3.  A tenant that holds no request is forgotten. If it was charged beyond the floor it leaves a
    debt behind, that it finds again when it comes back: else whoever sends one request after the
    other would start from the floor each time. Of debts, the latest :data:`MAX_DEBTS` are kept.

How fair that is. Say of a prompt at most P tokens are computed, and once a tenant waits for its
next turn, those of its requests that have begun give at most Q more output tokens together (Q is at
most rows times ``max_tokens``, plus the choices of one request). Two tenants that wait all the
time then differ by at most P + 2 Q in their counters: whoever is ahead had the least counter at
its last turn, and has since been charged for one prompt and those outputs. So over any stretch of
time the service they get differs by at most twice that, however long it is and whatever others do.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

import attrs

#: An output token costs a forward of its own, a prompt token shares one (Sheng et al., 4.1).
PROMPT_WEIGHT: Final = 1
OUTPUT_WEIGHT: Final = 2
#: Tenants. Ten times as many as share one engine, at a few hundred bytes each.
MAX_DEBTS: Final = 1024
#: Outdated entries that the heap may hold for each that counts, and then some.
_SLACK: Final = 2, 64


@attrs.define(eq=False)
class Account:
    """The service that one tenant got."""

    tenant: str
    #: Weighed tokens.
    counter: int = 0
    #: Requests held.
    holds: int = 0
    #: When it started to wait, counted over all tenants; ``None`` while it does not wait.
    ticket: int | None = None

    def charge(self, tokens: int) -> None:
        """Count service; ``tokens`` are weighed already."""
        self.counter += tokens


@attrs.define(eq=False)
class FairShares:
    """The accounts of all tenants that hold a request. Each operation is O(log tenants)."""

    accounts: dict[str, Account] = attrs.field(factory=dict, init=False)
    #: Of tenants that hold nothing, the oldest debt first.
    debts: OrderedDict[str, Account] = attrs.field(factory=OrderedDict, init=False)
    # Counters at the time of entry. They only grow, so an outdated entry shows up too early,
    # never too late, and is put right then: charging costs the heap nothing.
    _heap: list[tuple[int, int, Account]] = attrs.field(factory=list, init=False)
    _waiting: int = attrs.field(default=0, init=False)
    _tickets: int = attrs.field(default=0, init=False)
    _last: int = attrs.field(default=0, init=False)

    def open(self, tenant: str) -> Account:
        """The tenant's account, for one more request of its."""
        account = self.accounts.get(tenant)
        if account is None:
            account = self.debts.pop(tenant, None) or Account(tenant)
            self.accounts[tenant] = account
        account.holds += 1
        return account

    def close(self, account: Account) -> None:
        """Note that a request of the tenant has ended. Its last one no longer waits then."""
        account.holds -= 1
        if account.holds:
            return
        del self.accounts[account.tenant]
        if account.counter > self.floor:
            self.debts[account.tenant] = account
            if len(self.debts) > MAX_DEBTS:
                self.debts.popitem(last=False)

    def wait(self, account: Account) -> None:
        """Let a tenant take part. No-op where it waits already."""
        if account.ticket is not None:
            return
        account.counter = max(account.counter, self.floor)
        account.ticket = self._tickets
        self._tickets += 1
        self._waiting += 1
        heappush(self._heap, (account.counter, account.ticket, account))
        factor, spare = _SLACK
        if len(self._heap) > factor * self._waiting + spare:
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapify(self._heap)

    def rest(self, account: Account) -> None:
        """Leave a tenant out until it waits again. No-op where it does not wait."""
        if account.ticket is None:
            return
        account.ticket = None
        self._waiting -= 1
        if not self._waiting:
            self._last = account.counter
            self._heap.clear()

    def next(self) -> Account | None:
        """The tenant whose turn it is, or ``None`` where nobody waits. Changes no order."""
        heap = self._heap
        while heap:
            counter, ticket, account = heap[0]
            if account.ticket != ticket:
                heappop(heap)
            elif account.counter != counter:
                heapreplace(heap, (account.counter, ticket, account))
            else:
                return account
        return None

    @property
    def floor(self) -> int:
        """Where a tenant's counter begins."""
        least = self.next()
        return self._last if least is None else least.counter
