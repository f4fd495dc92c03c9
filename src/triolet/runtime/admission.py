"""Who may come in: bounds on what is live and what waits, and when to come back. Pure.

Rules:

1. A request holds one place from its arrival to its end, and one more for each further prompt.
   There are ``max_live`` places.
2. A prompt waits from its admission until the engine begins with it, or until its request
   ends. The tokens of all that wait are at most ``max_queued_tokens``, with one exception: where
   none waits, a request is let in whatever its size, or it could never be served.
3. Whatever is taken is given back once. :meth:`Admission.started` a second time, or too late, is
   nothing.
4. ``Retry-After`` is the time in which what is missing becomes free at the measured rate: of
   requests that end, where places are missing; of prompt tokens that the engine begins with,
   where the queue is too long. Those who leave the queue by giving up are not in the latter: it is
   the engine's pace, not the clients' patience.
5. Nothing here takes longer for more requests, but for a refusal, which looks at the last
   :data:`RATE_WINDOW` events.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

import attrs

from triolet.core import RequestId
from triolet.errors import QueueFullError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: Events that a rate is measured over: enough to smooth, few enough to follow the load.
RATE_WINDOW = 32
#: What happens within this time is one event: an engine step starts or ends many at once, and a
#: window full of them would say nothing about the time between steps.
RATE_GRAIN_S = 0.02
#: Bounds of ``Retry-After``. Clients treat more than two minutes as "do not retry at all".
RETRY_AFTER_MIN_S, RETRY_AFTER_MAX_S = 1.0, 60.0


@attrs.define
class Rate:
    """How fast something went lately: amounts and times of its last events."""

    _events: deque[tuple[float, int]] = attrs.field(
        factory=lambda: deque[tuple[float, int]](maxlen=RATE_WINDOW), init=False
    )

    def count(self, now_s: float, amount: int = 1) -> None:
        """So much happened now."""
        if self._events and now_s - self._events[-1][0] < RATE_GRAIN_S:
            began_s, before = self._events.pop()
            self._events.append((began_s, before + amount))
        else:
            self._events.append((now_s, amount))

    def seconds_for(self, amount: int, now_s: float) -> float:
        """Seconds that so much takes; 0 where nothing says."""
        if len(self._events) < 2 or now_s - self._events[-1][0] > RETRY_AFTER_MAX_S:  # noqa: PLR2004 - a rate takes two
            # Nothing to go by, or nothing that still says anything.
            return 0.0
        (first_s, first), (last_s, _) = self._events[0], self._events[-1]
        # The first event only says when the time begins.
        counted = sum(counted for _, counted in self._events) - first
        return amount * (last_s - first_s) / counted


@attrs.define
class Admission:
    """Bounds what is live, and of that what waits for the engine."""

    max_live: int
    #: ``None`` leaves it to ``max_live``.
    max_queued_tokens: int | None = None
    #: Places taken: of requests that have not ended, one for each prompt.
    live: int = attrs.field(default=0, init=False)
    #: Prompt tokens that the engine has not begun with.
    queued_tokens: int = attrs.field(default=0, init=False)
    #: The prompts that wait, and their tokens.
    _waiting: dict[RequestId, int] = attrs.field(factory=dict, init=False)
    _ended: Rate = attrs.field(factory=Rate, init=False)
    _begun: Rate = attrs.field(factory=Rate, init=False)

    @property
    def queued(self) -> int:
        """Prompts that wait for the engine."""
        return len(self._waiting)

    def enter(self, now_s: float, places: int = 1) -> None:
        """Take a place for a request that arrives, or so many.

        Raises:
            QueueFullError: As many are live as may be; says when to come back.
        """
        if self.live + places > self.max_live:
            raise QueueFullError(
                f"The server holds {self.live} requests and takes no more for now; "
                "try again after the time in Retry-After.",
                retry_after_s=self.retry_after_s(now_s, self.live + places - self.max_live),
            )
        self.live += places

    def wait(self, now_s: float, prompts: Mapping[RequestId, int]) -> None:
        """Queue the prompts of a request that has a place, given by their tokens. All or none.

        Raises:
            QueueFullError: There are too few places for its prompts, or too many tokens wait.
        """
        tokens = sum(prompts.values())
        if self.max_queued_tokens is not None and self.queued_tokens:
            over = self.queued_tokens + tokens - self.max_queued_tokens
            if over > 0:
                # Once nothing waits any size will do.
                missing = min(over, self.queued_tokens)
                raise QueueFullError(
                    f"{self.queued_tokens} prompt tokens wait for the engine, and the request's "
                    f"{tokens} would make it more than {self.max_queued_tokens}; try again after "
                    "the time in Retry-After.",
                    retry_after_s=_bounded(self._begun.seconds_for(missing, now_s)),
                )
        self.enter(now_s, len(prompts) - 1)
        self._waiting.update(prompts)
        self.queued_tokens += tokens

    def withdraw(self, prompts: Iterable[RequestId]) -> None:
        """Undo :meth:`wait`: the request keeps the one place that it had before."""
        for number, prompt in enumerate(prompts):
            self.queued_tokens -= self._waiting.pop(prompt, 0)
            self.live -= number > 0

    def started(self, now_s: float, prompt: RequestId) -> None:
        """The engine has begun with a prompt. A no-op for one that does not wait."""
        tokens = self._waiting.pop(prompt, None)
        if tokens is not None:
            self.queued_tokens -= tokens
            self._begun.count(now_s, tokens)

    def leave(self, now_s: float, prompts: Iterable[RequestId] = (), *, places: int = 1) -> None:
        """Give places back at the end of a request, and take those of its prompts that wait out."""
        for prompt in prompts:
            self.queued_tokens -= self._waiting.pop(prompt, 0)
        self.live -= places
        self._ended.count(now_s, places)

    def retry_after_s(self, now_s: float, places: int = 1) -> float:
        """Seconds until so many places are free, by the rate at which requests ended last."""
        return _bounded(self._ended.seconds_for(places, now_s))


def _bounded(seconds: float) -> float:
    return min(max(math.ceil(seconds), RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)
