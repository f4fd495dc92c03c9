"""Faults happen at their byte, in their direction, and no byte is changed on the way."""

from __future__ import annotations

import json

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from triolet.testing.checkpoints import for_every_checkpoint
from triolet.testing.pipe import open_pipe
from triolet.testing.streams import (
    Cut,
    Delay,
    Dribble,
    FaultyStream,
    HalfClose,
    Reset,
    Stall,
    fault_from_json,
    fault_to_json,
    reset_stream,
)

offsets = st.integers(0, 40)
patient = st.one_of(
    st.builds(Delay, st.floats(0, 10), offsets),
    st.builds(Stall, offsets, st.floats(0, 10)),
    st.builds(Dribble, st.integers(1, 7), offsets),
)
any_fault = st.one_of(
    patient,
    st.builds(Stall, offsets, st.none()),
    st.builds(Reset, offsets),
    st.builds(HalfClose, offsets),
    st.builds(Cut, offsets),
)


def faulty(*, sending=(), receiving=(), capacity=1024):
    ours, theirs = open_pipe(capacity)
    return FaultyStream(ours, sending=sending, receiving=receiving), theirs


async def read_all(stream):
    data = b""
    while more := await stream.receive_some():
        data += more
    return data


async def test_without_faults_it_is_a_stream_as_trio_understands_it():
    async def make():
        await trio.lowlevel.checkpoint()
        left, right = open_pipe(4096)
        return FaultyStream(left), FaultyStream(right)

    with trio.fail_after(10):
        await trio.testing.check_half_closeable_stream(make, None)


@given(any_fault)
def test_a_fault_is_json_and_back(fault):
    assert fault_from_json(json.loads(json.dumps(fault_to_json(fault)))) == fault


@pytest.mark.parametrize("written", [{"fault": "Earthquake"}, {}, {"fault": "Cut", "seconds": 1}])
def test_what_is_no_fault_is_refused(written):
    with pytest.raises(ValueError, match=r"a fault is one of|unexpected keyword"):
        fault_from_json(written)


@pytest.mark.parametrize(
    "kind",
    [Stall, Delay, Reset, lambda n: Dribble(n + 1)],
    ids=["stall", "delay", "reset", "dribble"],
)
def test_a_fault_that_makes_no_sense_is_refused(kind):
    kind(0)
    with pytest.raises(ValueError, match="must be"):
        kind(-1)


@pytest.mark.slow
@given(st.lists(patient, max_size=4), st.lists(patient, max_size=4), st.binary(max_size=60))
def test_faults_that_take_time_lose_no_byte(sending, receiving, data):
    async def main():
        ours, theirs = open_pipe(8)
        sender, receiver = (
            FaultyStream(ours, sending=sending),
            FaultyStream(theirs, receiving=receiving),
        )
        async with trio.open_nursery() as nursery:

            async def send():
                await sender.send_all(data)
                await sender.send_eof()

            nursery.start_soon(send)
            assert await read_all(receiver) == data
        assert sender.sent_bytes == receiver.received_bytes == len(data)

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def test_a_delay_is_paid_for_each_piece(autojump_clock):
    sender, peer = faulty(sending=[Dribble(10), Delay(2, at=20)])
    start = trio.current_time()
    await sender.send_all(b"x" * 50)
    assert trio.current_time() - start == pytest.approx(6)
    assert await peer.receive_some() == b"x" * 50


async def test_a_stall_is_paid_once_and_at_its_byte(autojump_clock):
    sender, peer = faulty(sending=[Stall(3, 5)])
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.send_all, b"abcdef")
        await wait_all_tasks_blocked()
        assert await peer.receive_some() == b"abc"
        assert await peer.receive_some() == b"def"
    await sender.send_all(b"g")
    assert trio.current_time() - start == pytest.approx(5)


async def test_a_stall_for_ever_can_be_cancelled_and_closed(autojump_clock):
    receiver, peer = faulty(receiving=[Stall(1)])
    await peer.send_all(b"abc")
    assert await receiver.receive_some() == b"a"
    with trio.move_on_after(1000) as patience:
        await receiver.receive_some()
    assert patience.cancelled_caught
    async with trio.open_nursery() as nursery:

        async def stuck():
            with pytest.raises(trio.ClosedResourceError):
                await receiver.receive_some()

        nursery.start_soon(stuck)
        await wait_all_tasks_blocked()
        await receiver.aclose()


async def test_a_dribble_makes_pieces_of_what_is_received(autojump_clock):
    receiver, peer = faulty(receiving=[Dribble(2, at=3)])
    await peer.send_all(b"abcdefgh")
    assert [await receiver.receive_some() for _ in range(4)] == [b"abc", b"de", b"fg", b"h"]


async def test_a_reset_breaks_both_directions_for_both_ends(autojump_clock):
    sender, peer = faulty(sending=[Stall(0, 1), Reset(3)])
    async with trio.open_nursery() as nursery:

        async def blocked():
            with pytest.raises(trio.BrokenResourceError):
                await sender.receive_some()

        nursery.start_soon(blocked)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BrokenResourceError):
            await sender.send_all(b"abcdef")
    for stream in (sender, peer):
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(b"x")


async def test_a_reset_happens_as_soon_as_its_byte_has_passed(autojump_clock):
    sender, peer = faulty(sending=[Reset(3)])
    await sender.send_all(b"abc")
    with pytest.raises(trio.BrokenResourceError):
        await peer.receive_some()


async def test_a_half_close_ends_one_direction_and_keeps_the_other(autojump_clock):
    sender, peer = faulty(sending=[HalfClose(3)], receiving=[HalfClose(4)])
    await sender.send_all(b"abcdef")
    await sender.send_all(b"into nothing")
    assert await read_all(peer) == b"abc"
    await peer.send_all(b"answer")
    assert await read_all(sender) == b"answ"


async def test_a_half_close_needs_a_stream_that_can(autojump_clock):
    class Whole(trio.abc.Stream):
        async def send_all(self, _data):
            await trio.lowlevel.checkpoint()

        async def wait_send_all_might_not_block(self):
            await trio.lowlevel.checkpoint()

        async def receive_some(self, _max_bytes=None):
            await trio.lowlevel.checkpoint()
            return b""

        async def aclose(self):
            await trio.lowlevel.checkpoint()

    with pytest.raises(TypeError, match="cannot close one direction"):
        await FaultyStream(Whole(), sending=[HalfClose()]).send_all(b"x")
    with pytest.raises(TypeError, match="cannot be reset"):
        reset_stream(Whole())
    broken = FaultyStream(Whole(), sending=[Reset()])
    with pytest.raises(trio.BrokenResourceError):
        await broken.send_all(b"x")


async def test_a_cut_is_an_end_for_the_peer_and_a_broken_send(autojump_clock):
    sender, peer = faulty(receiving=[Cut(4)])
    await peer.send_all(b"abcdef")
    assert await read_all(sender) == b"abcd"
    assert await read_all(peer) == b""
    for stream in (sender, peer):
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(b"x")


async def test_a_cut_wakes_who_waits_to_receive_with_the_end(autojump_clock):
    sender, peer = faulty(sending=[Cut(1)])
    async with trio.open_nursery() as nursery:

        async def reads_the_end():
            assert await sender.receive_some() == b""

        nursery.start_soon(reads_the_end)
        await wait_all_tasks_blocked()
        await sender.send_all(b"a")
    assert await read_all(peer) == b"a"


def test_a_cancellation_loses_no_byte_that_was_received():
    async def scenario(checkpoints):
        receiver, peer = faulty(receiving=[Stall(1, 5), Delay(1), Dribble(2), HalfClose(5)])
        await peer.send_all(b"abcdefg")
        got = b""
        with trio.CancelScope() as scope, checkpoints.watch(scope.cancel):
            while more := await receiver.receive_some():
                got += more
        if scope.cancelled_caught:
            got += await read_all(receiver)
        assert got == b"abcde"

    assert for_every_checkpoint(scenario) > 10


@pytest.mark.live
async def test_a_socket_is_reset_and_its_peer_sees_an_error():
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    client = await trio.testing.open_stream_to_socket_listener(listeners[0])
    server = await listeners[0].accept()
    async with client, server, listeners[0]:
        reset_stream(client)
        with pytest.raises(trio.BrokenResourceError):
            await server.receive_some()


def test_faults_are_values():
    assert attrs.evolve(Stall(3), seconds=4) == Stall(3, 4)
    assert len({Reset(1), Reset(1), Cut(1)}) == 2
