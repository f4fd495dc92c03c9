"""End a program at each of its checkpoints in turn, in every run from the start.

A Trio program can only be interrupted where one of its tasks suspends. These places can be
counted, so "it cleans up whenever it is cancelled" can be tested by trying every one::

    async def scenario(checkpoints):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transfer)
            with checkpoints.watch(nursery.cancel_scope.cancel):
                await trio.sleep(10)
        assert nothing_is_left()

    for_every_checkpoint(scenario)

Theory of operation. An instrument of Trio hears of every step of every task. The first run only
counts; run k fires the action right after step k, in Trio's loop, while other tasks may be
about to run. What happens up to there must be the same in every run, so time is a mock clock's
and the order of tasks, which Trio draws at random, comes from a seed. That leaves to the
scenario to use no threads, no real input and no random numbers that change its course. A run
that has fewer steps than the first one promised is reported as such.

Another seed is another order of tasks, and finds other bugs.

Nothing here is particular to Triolet.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import attrs
import trio
import trio._core._run as trio_run
import trio.lowlevel
from trio.testing import MockClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

T = TypeVar("T")

#: Virtual seconds that a scenario may take before it counts as stuck. What it waits for itself
#: is minutes at most, and a mock clock gets here in no time.
PATIENCE_S = 1e6

_TRIO = os.path.dirname(trio.__file__)  # noqa: PTH120 - compared with names of code objects


@attrs.frozen
class Checkpoint:
    """Where a task has just suspended, or ended."""

    #: Counted from 1.
    number: int
    task: str
    #: The line that waits, of the innermost function that is not Trio's.
    where: str

    def __str__(self) -> str:
        return f"checkpoint {self.number}, task {self.task!r}, {self.where}"


class CheckpointNotReachedError(Exception):
    """A run had fewer checkpoints than the one that counted them: they differ in more than the end.

    Look for threads, real time, random numbers, and the order of sets.
    """


class Checkpoints(trio.abc.Instrument):
    """Counts the steps of a scenario's tasks, and fires at one of them.

    Args:
        fire_at: The number of the checkpoint; ``None`` only counts.
    """

    def __init__(self, fire_at: int | None = None) -> None:
        self.fire_at = fire_at
        #: Checkpoints so far.
        self.count = 0
        #: Where the action was fired, once it was.
        self.fired: Checkpoint | None = None
        self._action: Callable[[], object] | None = None
        self._counts: Callable[[trio.lowlevel.Task], bool] = every_task
        self._error: BaseException | None = None

    @contextmanager
    def watch(
        self,
        action: Callable[[], object],
        *,
        tasks: Callable[[trio.lowlevel.Task], bool] | None = None,
    ) -> Iterator[None]:
        """Count checkpoints while the block runs.

        Args:
            action: Fired at the one checkpoint. It is called from Trio's loop, so it must not
                wait: cancel a scope, set an event, close a channel.
            tasks: Whose steps count; those of all tasks where left out.

        Raises:
            Exception: What ``action`` raised, at the end of the block.
        """
        self._action, self._counts = action, tasks or every_task
        try:
            yield
        finally:
            self._action = None
        if self._error is not None:
            raise self._error

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """See :meth:`trio.abc.Instrument.after_task_step`: a task has suspended or ended."""
        if self._action is None or not self._counts(task):
            return
        self.count += 1
        if self.count != self.fire_at or self.fired is not None:
            return
        self.fired = Checkpoint(self.count, task.name, _where(task))
        try:
            self._action()
        except BaseException as error:  # noqa: BLE001, ASYNC103 - raised by watch(); Trio would log it and go on
            self._error = error


#: A program to be ended: it runs to its end each time, and checks what it wants to hold.
Scenario: TypeAlias = Callable[[Checkpoints], Awaitable[object]]


def every_task(task: trio.lowlevel.Task) -> bool:
    """All tasks but the one that Trio runs the others in."""
    return task.parent_nursery is not None


def below(nursery: trio.Nursery) -> Callable[[trio.lowlevel.Task], bool]:
    """The tasks that run in a nursery, and those that they have started in nurseries of theirs."""

    def runs_below(task: trio.lowlevel.Task) -> bool:
        at: trio.lowlevel.Task | None = task
        while at is not None and at.parent_nursery is not None:
            if at.parent_nursery is nursery:
                return True
            at = at.parent_nursery.parent_task
        return False

    return runs_below


def count_checkpoints(scenario: Scenario, *, seed: int = 0) -> int:
    """How many checkpoints a scenario has when nothing ends it.

    Raises:
        Exception: What the scenario raises, with a note.
    """
    checkpoints = Checkpoints()
    try:
        run_seeded(scenario, checkpoints, seed=seed, instruments=[checkpoints])
    except BaseException as error:
        error.add_note(f"nothing ended it; replay with count_checkpoints(scenario, seed={seed})")
        raise
    return checkpoints.count


def at_checkpoint(scenario: Scenario, number: int, *, seed: int = 0) -> Checkpoint:
    """Run a scenario and fire its action at one checkpoint. Replays what failed.

    Returns:
        Where that was.

    Raises:
        CheckpointNotReachedError: The scenario has ended before.
        Exception: What the scenario raises, with a note on how to replay it.
    """
    checkpoints = Checkpoints(number)
    try:
        run_seeded(scenario, checkpoints, seed=seed, instruments=[checkpoints])
    except BaseException as error:
        error.add_note(
            f"ended at {checkpoints.fired or f'no checkpoint: {number} was not reached'}; "
            f"replay with at_checkpoint(scenario, {number}, seed={seed})"
        )
        raise
    if checkpoints.fired is None:
        raise CheckpointNotReachedError(
            f"there was no checkpoint {number}, the run had {checkpoints.count} (seed {seed})"
        )
    return checkpoints.fired


def for_every_checkpoint(
    scenario: Scenario, *, seed: int = 0, every: int = 1, first: int = 1
) -> int:
    """Run a scenario once to count its checkpoints, then once for each, ended there.

    Args:
        scenario: Called afresh each time.
        seed: Of the order in which tasks run.
        every: Take only every so many checkpoints, for a program with a great many.
        first: The first one taken.

    Returns:
        How many checkpoints there are.

    Raises:
        Exception: Of the first checkpoint at which the scenario raised, with a note on how to
            replay it.
    """
    total = count_checkpoints(scenario, seed=seed)
    for number in range(first, total + 1, every):
        at_checkpoint(scenario, number, seed=seed)
    return total


def run_seeded(
    async_fn: Callable[..., Awaitable[T]],
    *args: object,
    seed: int = 0,
    instruments: Sequence[trio.abc.Instrument] = (),
) -> T:
    """``trio.run`` in virtual time, with the order of tasks drawn from ``seed``.

    Raises:
        trio.TooSlowError: It took more than :data:`PATIENCE_S` of virtual time.
    """

    async def main() -> T:
        with trio.fail_after(PATIENCE_S):
            return await async_fn(*args)

    with seeded_scheduling(seed):
        return trio.run(main, clock=MockClock(autojump_threshold=0), instruments=instruments)


@contextmanager
def seeded_scheduling(seed: int) -> Iterator[None]:
    """Make ``trio.run`` draw the order of runnable tasks from ``seed``, while the block runs.

    Trio has no public name for it. What it has is a flag and a generator that its own plugin for
    Hypothesis uses (python-trio/trio#840, #890); this is the one place that touches them.
    """
    flag = trio_run._ALLOW_DETERMINISTIC_SCHEDULING  # noqa: SLF001 - see above
    state = trio_run._r.getstate()  # noqa: SLF001 - see above
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc] # noqa: SLF001 - see above; Trio assigns to it itself
    trio_run._r.seed(seed)  # noqa: SLF001 - see above
    try:
        yield
    finally:
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING = flag  # type: ignore[misc] # noqa: SLF001 - as above
        trio_run._r.setstate(state)  # noqa: SLF001 - see above


def _where(task: trio.lowlevel.Task) -> str:
    found: tuple[FrameType, int] | None = None
    for frame, line in task.iter_await_frames():
        if not frame.f_code.co_filename.startswith(_TRIO):
            found = frame, line
    if found is None:
        return "at its end"
    code = found[0].f_code
    return f"{os.path.basename(code.co_filename)}:{found[1]} in {code.co_qualname}"  # noqa: PTH119 - a code object's name
