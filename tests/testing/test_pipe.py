"""A pipe holds what it holds, as a kernel does."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from trio.testing import wait_all_tasks_blocked

from triolet.testing.pipe import open_pipe


async def test_it_is_a_stream_as_trio_understands_it():
    async def make():
        await trio.lowlevel.checkpoint()
        return open_pipe(4096)

    async def make_clogged():
        left, right = await make()
        await left.send_some(b"x" * 4096)
        await right.send_some(b"x" * 4096)
        return left, right

    with trio.fail_after(10):
        await trio.testing.check_half_closeable_stream(make, make_clogged)


async def test_a_send_waits_while_the_pipe_is_full_and_its_progress_is_seen(autojump_clock):
    ours, theirs = open_pipe(10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.send_all, b"x" * 25)
        await wait_all_tasks_blocked()
        assert (ours.undelivered_bytes, theirs.unread_bytes) == (10, 10)
        assert await theirs.receive_some(4) == b"xxxx"
        await wait_all_tasks_blocked()
        assert ours.undelivered_bytes == 10
        rest = b"".join([await theirs.receive_some() for _ in range(3)])
        assert len(rest) == 21


async def test_what_a_cancelled_send_has_handed_over_stays_so(autojump_clock):
    ours, theirs = open_pipe(10)
    with trio.move_on_after(1):
        await ours.send_all(b"0123456789abc")
    assert await theirs.receive_some() == b"0123456789"
    assert ours.undelivered_bytes == 0


def test_send_now_takes_what_there_is_room_for():
    ours, theirs = open_pipe(10)
    assert ours.send_now(b"0123456") == 7
    assert ours.send_now(b"789abc") == 3
    assert ours.send_now(b"abc") == 0
    theirs.close()
    with pytest.raises(BrokenPipeError):
        ours.send_now(b"x")
    ours.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        ours.send_now(b"x")


async def test_a_close_delivers_what_was_sent_and_breaks_the_peers_sends(autojump_clock):
    ours, theirs = open_pipe()
    await ours.send_all(b"last words")
    ours.close()
    assert await theirs.receive_some() == b"last words"
    assert await theirs.receive_some() == b""
    with pytest.raises(trio.BrokenResourceError):
        await theirs.send_all(b"too late")
    with pytest.raises(trio.ClosedResourceError):
        await ours.send_all(b"x")


async def test_a_reset_delivers_nothing_more_and_wakes_both_ends(autojump_clock):
    ours, theirs = open_pipe(4)
    await ours.send_all(b"lost")
    async with trio.open_nursery() as nursery:

        async def expect(error, function, *args):
            with pytest.raises(error):
                await function(*args)

        nursery.start_soon(expect, trio.ClosedResourceError, ours.send_all, b"x")
        nursery.start_soon(expect, trio.ClosedResourceError, ours.receive_some)
        await wait_all_tasks_blocked()
        ours.reset()
    for function, args in ((theirs.receive_some, ()), (theirs.send_all, (b"x",))):
        with pytest.raises(trio.BrokenResourceError):
            await function(*args)


def test_a_pipe_that_could_hold_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1 byte"):
        open_pipe(0)
