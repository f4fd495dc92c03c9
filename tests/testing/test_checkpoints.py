"""A program is ended at each of its checkpoints, in the same way each time."""

from __future__ import annotations

import random

import pytest
import trio
import trio._core._run as trio_run

from triolet.testing.checkpoints import (
    Checkpoint,
    CheckpointNotReachedError,
    Checkpoints,
    at_checkpoint,
    below,
    count_checkpoints,
    for_every_checkpoint,
    run_seeded,
    seeded_scheduling,
)


async def order_of_tasks():
    order = []

    async def note(name):
        for _ in range(3):
            order.append(name)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for name in "abcdef":
            nursery.start_soon(note, name)
    return "".join(order)


def test_a_seed_fixes_the_order_of_tasks_and_another_changes_it():
    orders = [run_seeded(order_of_tasks, seed=seed) for seed in range(5)]

    assert orders == [run_seeded(order_of_tasks, seed=seed) for seed in range(5)]
    assert len(set(orders)) > 1


def test_the_scheduler_is_left_as_it_was():
    flag, state = trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r.getstate()

    async def fails():
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError

    with seeded_scheduling(1):
        assert trio_run._r.getstate() == random.Random(1).getstate()
    with pytest.raises(ZeroDivisionError):
        run_seeded(fails, seed=1)
    assert (trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r.getstate()) == (flag, state)


async def careful(checkpoints, undone):
    """Three steps, undone in order whatever happens between them."""
    done = []
    async with trio.open_nursery() as nursery:
        with checkpoints.watch(nursery.cancel_scope.cancel):
            for step in range(3):
                done.append(step)
                try:
                    await trio.sleep(60)
                finally:
                    done.remove(step)
    assert done == []
    undone.append(trio.current_time())


def test_every_checkpoint_is_tried_once_from_the_start():
    ends = []

    async def scenario(checkpoints):
        await careful(checkpoints, ends)

    assert for_every_checkpoint(scenario) == count_checkpoints(scenario) == len(ends) - 2
    # The first run is not ended, nor is the one that counted here; those between are.
    assert ends[0] == ends[-1] == pytest.approx(180)
    assert sorted(set(ends[1:-1])) == pytest.approx([0, 60, 120])


def test_a_failure_says_where_it_was_ended_and_how_to_replay_it():
    async def scenario(checkpoints):
        held = 0

        async def careless():
            nonlocal held
            await trio.sleep(1)
            held = 1
            await trio.sleep(1)
            held = 0

        async with trio.open_nursery() as nursery:
            nursery.start_soon(careless, name="careless")
            with checkpoints.watch(nursery.cancel_scope.cancel):
                await trio.sleep(3)
        assert held == 0

    with pytest.raises(AssertionError) as caught:
        for_every_checkpoint(scenario, seed=3)
    (note,) = caught.value.__notes__
    number = int(note.split(",")[0].removeprefix("ended at checkpoint "))
    assert "task 'careless', test_checkpoints.py:" in note
    assert note.endswith(f"replay with at_checkpoint(scenario, {number}, seed=3)")
    with pytest.raises(AssertionError):
        at_checkpoint(scenario, number, seed=3)
    before = at_checkpoint(scenario, number - 1, seed=3)
    assert before.number == number - 1


def test_only_the_steps_of_the_tasks_asked_for_count():
    async def scenario(checkpoints):
        async def steps(number):
            for _ in range(number):
                await trio.lowlevel.checkpoint()

        async def parent():
            async with trio.open_nursery() as inner:
                inner.start_soon(steps, 5)
                inner.start_soon(steps, 0)

        async with trio.open_nursery() as others, trio.open_nursery() as nursery:
            others.start_soon(steps, 20)
            with checkpoints.watch(lambda: None, tasks=below(nursery)):
                nursery.start_soon(parent)
                await trio.sleep(1)

    # Five checkpoints and an end, an end alone, and their parent's waiting and end.
    assert count_checkpoints(scenario) == 9


def test_a_task_can_be_ended_right_after_it_has_ended_by_itself():
    places = []

    async def scenario(checkpoints):
        async with trio.open_nursery() as nursery:
            with checkpoints.watch(lambda: None, tasks=below(nursery)):
                nursery.start_soon(trio.lowlevel.checkpoint)
                await trio.sleep(1)
        places.append(checkpoints.fired)

    for_every_checkpoint(scenario)
    assert places[-1] == Checkpoint(2, "trio.lowlevel.checkpoint", "at its end")


def test_what_the_action_raises_fails_the_run():
    async def scenario(checkpoints):
        def fail():
            raise LookupError("the action")

        with checkpoints.watch(fail):
            await trio.sleep(1)

    with pytest.raises(LookupError):
        at_checkpoint(scenario, 1)
    count_checkpoints(scenario)


def test_a_run_that_ends_too_early_is_no_success():
    runs = 0

    async def scenario(checkpoints):
        nonlocal runs
        runs += 1
        with checkpoints.watch(lambda: None):
            for _ in range(5 - runs):
                await trio.lowlevel.checkpoint()

    with pytest.raises(CheckpointNotReachedError, match="there was no checkpoint"):
        for_every_checkpoint(scenario)


def test_a_scenario_that_hangs_fails_instead():
    async def scenario(checkpoints):
        with checkpoints.watch(lambda: None):
            await trio.sleep_forever()

    with pytest.raises(trio.TooSlowError) as caught:
        count_checkpoints(scenario)
    (note,) = caught.value.__notes__
    assert note == "nothing ended it; replay with count_checkpoints(scenario, seed=0)"


def test_a_stride_takes_every_so_many():
    fired = []

    async def scenario(checkpoints):
        with checkpoints.watch(lambda: fired.append(checkpoints.count)):
            for _ in range(10):
                await trio.lowlevel.checkpoint()

    for_every_checkpoint(scenario, every=4, first=2)
    assert fired == [2, 6, 10]


def test_checkpoints_only_count_while_watched():
    async def scenario(checkpoints):
        await trio.sleep(1)
        with checkpoints.watch(lambda: None):
            await trio.sleep(1)
        await trio.sleep(1)
        assert checkpoints.count == 1

    checkpoints = Checkpoints()
    run_seeded(scenario, checkpoints, instruments=[checkpoints])
