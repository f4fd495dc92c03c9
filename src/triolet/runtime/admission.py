"""Who may come in: bounds on what is live and what waits, and when to come back. Pure.

Rules:

1. A request holds one place from its arrival to its end, and one more for each further prompt.
   There are ``max_live`` places.
2. A prompt waits from its admission until the engine begins with it, or until its request
   ends. The tokens of all that wait are at most ``max_queued_tokens``, with one exception: where
   none waits, a request is let in whatever its size, or it could never be served.
3. Where there is more than one tenant, the last :data:`RESERVED_SHARE` of the places is for those
   that hold none, one for each of them, and the same share of the tokens for those of whom
   nothing waits. So nobody fills the server alone, and whoever comes finds the door open unless
   as many others came to it before. The bounds of rules 1 and 2 hold for all together.
4. Whatever is taken is given back once. :meth:`Admission.started` a second time, or too late, is
   nothing.
5. ``Retry-After`` is the time in which what is missing becomes free at the measured rate: of
   admitted requests that end, where places are missing; of prompt tokens that the engine begins
   with, where the queue is too long. Those who leave the queue by giving up are not in the latter:
   it is the engine's pace, not the clients' patience. Nor are in the former those who were refused.
6. A rate is measured while there is something to do: while half of the places are taken, while a
   prompt waits. At other times it would say how seldom clients come.
7. Nothing here takes longer for more requests, but for a refusal, which looks at the last
   :data:`RATE_WINDOW` events.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import TYPE_CHECKING

import attrs

from triolet.core import RequestId
from triolet.errors import QueueFullError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

#: Events that a rate is measured over: enough to smooth, few enough to follow the load.
RATE_WINDOW = 32
#: What happens within this time is one event: an engine step starts or ends many at once, and a
#: window full of them would say nothing about the time between steps.
RATE_GRAIN_S = 0.02
#: What is kept for tenants that have nothing: enough for a few to come at once, little enough that
#: a tenant that is alone for a while does not miss it. One place at least.
RESERVED_SHARE = 1 / 8
#: Bounds of ``Retry-After``. Clients treat more than two minutes as "do not retry at all".
RETRY_AFTER_MIN_S, RETRY_AFTER_MAX_S = 1.0, 60.0


@attrs.define
class Rate:
    """How fast something goes while there is something to do: amounts and times of its last events.

    Its clock stands still from :meth:`rest` to :meth:`work`, and so it does at first.
    """

    #: Times are of its own clock. The first event only says when the time begins.
    _events: deque[tuple[float, int]] = attrs.field(
        factory=lambda: deque[tuple[float, int]](maxlen=RATE_WINDOW), init=False
    )
    #: What the clock showed when it last stood still, and since when it runs or stands.
    _shown_s: float = attrs.field(default=0.0, init=False)
    _since_s: float = attrs.field(default=-math.inf, init=False)
    _works: bool = attrs.field(default=False, init=False)

    def work(self, now_s: float) -> None:
        """There is something to do from now on. A no-op if there was already."""
        if self._works:
            return
        if now_s - self._since_s > RETRY_AFTER_MAX_S:
            # What was long ago says nothing any more.
            self._events.clear()
        self._works, self._since_s = True, now_s
        if not self._events:
            self._events.append((self._shown_s, 0))

    def rest(self, now_s: float) -> None:
        """There is nothing to do from now on. A no-op if there was nothing already."""
        if self._works:
            self._shown_s = self._clock(now_s)
            self._works, self._since_s = False, now_s

    def count(self, now_s: float, amount: int = 1) -> None:
        """So much happened now; what happens at rest is not counted."""
        if not self._works:
            return
        clock_s = self._clock(now_s)
        began_s, before = self._events[-1]
        if clock_s - began_s < RATE_GRAIN_S:
            self._events[-1] = began_s, before + amount
        else:
            self._events.append((clock_s, amount))

    def seconds_for(self, amount: int, now_s: float) -> float:
        """Seconds that so much takes: 0 where nothing says, infinitely many where nothing moves."""
        if not self._events:
            return 0.0
        (first_s, first), (last_s, _) = self._events[0], self._events[-1]
        if self._clock(now_s) - last_s > RETRY_AFTER_MAX_S:
            return math.inf
        counted = sum(counted for _, counted in self._events) - first
        return amount * (last_s - first_s) / counted if counted else 0.0

    def _clock(self, now_s: float) -> float:
        return self._shown_s + now_s - self._since_s if self._works else self._shown_s


@attrs.define
class Admission:
    """Bounds what is live, and of that what waits for the engine."""

    max_live: int
    #: ``None`` leaves it to ``max_live``.
    max_queued_tokens: int | None = None
    #: Whether there is more than one tenant, so that something is kept for each.
    shared: bool = False
    #: Places taken: of requests that have not ended, one for each prompt.
    live: int = attrs.field(default=0, init=False)
    #: Prompt tokens that the engine has not begun with.
    queued_tokens: int = attrs.field(default=0, init=False)
    #: By tenant, the places that it holds and its prompts that wait; none of them is 0.
    _places: Counter[str] = attrs.field(factory=Counter[str], init=False)
    _prompts: Counter[str] = attrs.field(factory=Counter[str], init=False)
    #: The prompts that wait: whose, and of how many tokens.
    _waiting: dict[RequestId, tuple[str, int]] = attrs.field(factory=dict, init=False)
    _ended: Rate = attrs.field(factory=Rate, init=False)
    _begun: Rate = attrs.field(factory=Rate, init=False)

    @property
    def queued(self) -> int:
        """Prompts that wait for the engine."""
        return len(self._waiting)

    @property
    def max_at_once(self) -> int:
        """The places that one request can have, if it finds none taken."""
        return max(1, self._bound(self.max_live, newcomer=False))

    def enter(self, now_s: float, tenant: str = "") -> None:
        """Take a place for a request that arrives.

        Raises:
            QueueFullError: As many are live as may be; says when to come back.
        """
        missing = self._missing(1, newcomer=tenant not in self._places)
        if missing > 0:
            kept = " of this key" if self.live < self.max_live else ""
            raise QueueFullError(
                f"The server holds {self.live} requests and takes no more{kept} for now; "
                "try again after the time in Retry-After.",
                retry_after_s=self.retry_after_s(now_s, missing),
            )
        self._take(now_s, tenant, 1)

    def wait(self, now_s: float, prompts: Mapping[RequestId, int], tenant: str = "") -> None:
        """Queue the prompts of a request that has a place, given by their tokens. All or none.

        Raises:
            QueueFullError: There are too few places for its prompts, or too many tokens wait.
        """
        tokens = sum(prompts.values())
        if self.max_queued_tokens is not None and self.queued_tokens:
            newcomer = tenant not in self._prompts
            over = (
                self.queued_tokens + tokens - self._bound(self.max_queued_tokens, newcomer=newcomer)
            )
            if over > 0:
                # Once nothing waits any size will do.
                missing = min(over, self.queued_tokens)
                raise QueueFullError(
                    f"{self.queued_tokens} prompt tokens wait for the engine, and the request's "
                    f"{tokens} are {over} too many; try again after the time in Retry-After.",
                    retry_after_s=_bounded(self._begun.seconds_for(missing, now_s)),
                )
        further = len(prompts) - 1
        missing = self._missing(further, newcomer=False)
        if further and missing > 0:
            raise QueueFullError(
                f"The server holds {self.live} requests, and {missing} more would have to end for "
                f"the {len(prompts)} prompts of this one; try again after the time in Retry-After.",
                retry_after_s=self.retry_after_s(now_s, missing),
            )
        self._take(now_s, tenant, further)
        self._waiting.update((prompt, (tenant, size)) for prompt, size in prompts.items())
        self._prompts[tenant] += len(prompts)
        self.queued_tokens += tokens
        self._begun.work(now_s)

    def withdraw(self, now_s: float, prompts: Iterable[RequestId], tenant: str = "") -> None:
        """Undo :meth:`wait`: the request keeps the one place that it had before."""
        prompts = tuple(prompts)
        self._drop(now_s, prompts)
        self._give_back(now_s, tenant, len(prompts) - 1)

    def started(self, now_s: float, prompt: RequestId) -> None:
        """The engine has begun with a prompt. A no-op for one that does not wait."""
        if prompt in self._waiting:
            _, tokens = self._waiting[prompt]
            self._begun.count(now_s, tokens)
            self._drop(now_s, (prompt,))

    def leave(self, now_s: float, prompts: Collection[RequestId], tenant: str = "") -> None:
        """Give the places of an admitted request back at its end; its prompts wait no more."""
        self._drop(now_s, prompts)
        self._ended.count(now_s, len(prompts))
        self._give_back(now_s, tenant, len(prompts))

    def turn_back(self, now_s: float, tenant: str = "") -> None:
        """Give the place back of a request that was never admitted."""
        self._give_back(now_s, tenant, 1)

    def retry_after_s(self, now_s: float, places: int = 1) -> float:
        """Seconds until so many places are free, by the rate at which requests ended last."""
        return _bounded(self._ended.seconds_for(places, now_s))

    def _bound(self, bound: int, *, newcomer: bool) -> int:
        reserved = max(1, int(bound * RESERVED_SHARE)) if self.shared and not newcomer else 0
        return bound - reserved

    def _missing(self, places: int, *, newcomer: bool) -> int:
        return self.live + places - self._bound(self.max_live, newcomer=newcomer)

    def _take(self, now_s: float, tenant: str, places: int) -> None:
        self.live += places
        self._places[tenant] += places
        if 2 * self.live >= self.max_live:
            self._ended.work(now_s)

    def _give_back(self, now_s: float, tenant: str, places: int) -> None:
        self.live -= places
        _subtract(self._places, tenant, places)
        if 2 * self.live < self.max_live:
            self._ended.rest(now_s)

    def _drop(self, now_s: float, prompts: Iterable[RequestId]) -> None:
        for prompt in prompts:
            waited = self._waiting.pop(prompt, None)
            if waited is not None:
                tenant, tokens = waited
                self.queued_tokens -= tokens
                _subtract(self._prompts, tenant, 1)
        if not self._waiting:
            self._begun.rest(now_s)


def _subtract(counter: Counter[str], tenant: str, amount: int) -> None:
    counter[tenant] -= amount
    # A tenant that has nothing is nobody, or the books would grow.
    if not counter[tenant]:
        del counter[tenant]


def _bounded(seconds: float) -> float:
    return min(
        max(math.ceil(min(seconds, RETRY_AFTER_MAX_S)), RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S
    )
