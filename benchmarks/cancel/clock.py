"""When a server stops spending processor time: the clock and the definition.

The clock is the kernel's CPU clock of each process of the server's tree, all threads together
(``clock_getcpuclockid(3)``). It is the quantity of ``/proc/PID/stat`` in nanoseconds instead of
ticks of 10 ms, and it is true in the middle of a time slice.

*Stopped* is the first moment after which the server spends no more than :data:`SLACK_S` of
processor time beyond its idle level, until a whole second has passed like that. So the figures
resolve :data:`STEP_S` in time, and a leftover of up to 5 ms of work passes for none.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs

from serving import process_tree

if TYPE_CHECKING:
    from collections.abc import Callable

#: Between two looks at the clock. A look costs a few microseconds.
STEP_S = 0.003
#: Processor time that is housekeeping: closing a socket, a line of log.
SLACK_S = 0.005
#: What has to pass without work before a server counts as stopped. No server here waits that
#: long in the middle of a request.
QUIET_S = 1.0
#: The idle level wavers by about this share of itself, for servers that spin when idle.
_WAVER = 0.2


@attrs.define(eq=False)
class TreeClock:
    """Processor seconds of a process and its descendants, since they began."""

    root: int
    _last: dict[int, float] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.look_for_children()

    def look_for_children(self) -> None:
        """Count processes too that began since the last look."""
        for pid in process_tree(self.root):
            self._last.setdefault(pid, 0.0)

    def read(self) -> float:
        """The sum; what has ended counts with what it had."""
        for pid in self._last:
            try:
                # As clock_getcpuclockid() makes the number: all threads, scheduled time.
                self._last[pid] = time.clock_gettime((~pid << 3) | 2)
            except OSError:
                continue
        return sum(self._last.values())


def idle_share(clock: TreeClock, seconds: float = 3.0) -> float:
    """Cores that the server uses while nobody asks for anything."""
    clock.look_for_children()
    before, began = clock.read(), time.perf_counter()
    time.sleep(seconds)
    return (clock.read() - before) / (time.perf_counter() - began)


@attrs.frozen
class Stop:
    """When it stopped, and what it spent until then beyond its idle level."""

    #: Seconds from the given moment; 0 where it had stopped before.
    seconds: float
    cpu_s: float
    #: Whether it ran on when patience was over: then the figures are what they were by then.
    ran_on: bool = False


@attrs.define(eq=False)
class Curve:
    """Processor time beyond the idle level, over time."""

    idle: float
    times: list[float] = attrs.field(factory=list)
    spent: list[float] = attrs.field(factory=list)
    _second_ago: int = 0

    @property
    def slack_s(self) -> float:
        """Spending in a quiet second that counts as none."""
        return SLACK_S + _WAVER * self.idle * QUIET_S

    def add(self, now: float, cpu_s: float) -> bool:
        """Take a look; whether the last second was quiet."""
        self.times.append(now)
        self.spent.append(cpu_s - self.idle * now)
        # The last look that is a whole second old.
        while self._second_ago + 1 < len(self.times) and (
            self.times[self._second_ago + 1] <= now - QUIET_S
        ):
            self._second_ago += 1
        if now - self.times[0] < QUIET_S:
            return False
        return self.spent[-1] - self.spent[self._second_ago] <= self.slack_s

    def stopped(self, since: float) -> Stop:
        """The stop, in seconds from ``since``."""
        end = self.spent[-1]
        for now, spent in zip(self.times, self.spent, strict=True):
            if end - spent <= self.slack_s:
                return Stop(max(0.0, now - since), max(0.0, spent - self.spent[0]))
        raise AssertionError("the last look is within the slack of itself")


def watch(
    clock: TreeClock,
    idle: float,
    patience_s: float,
    *,
    since: float | None = None,
    each: Callable[[], None] = lambda: None,
) -> Stop:
    """Look until the server is quiet.

    Args:
        clock: Of the server.
        idle: Its idle level, in cores.
        patience_s: Seconds after which to give up.
        since: From when seconds are counted (``time.perf_counter()``), else from now.
        each: Called after each look.
    """
    curve = Curve(idle)
    began = time.perf_counter()
    since = began if since is None else since
    while not curve.add(time.perf_counter(), clock.read()):
        if curve.times[-1] - since > patience_s:
            spent = curve.spent[-1] - curve.spent[0]
            return Stop(curve.times[-1] - since, spent, ran_on=True)
        each()
        time.sleep(STEP_S)
    return curve.stopped(since)


def settle(clock: TreeClock, idle: float, patience_s: float) -> bool:
    """Wait until the server is idle; whether it became so."""
    clock.look_for_children()
    return not watch(clock, idle, patience_s).ran_on
