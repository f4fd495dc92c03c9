"""Accepting in bursts, with errors on cue and cancellation at every point."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack, contextmanager

import pytest
import trio
import trio.testing

from triolet.core import CancelCause
from triolet.server import accept
from triolet.server.accept import ACCEPTS_PER_PASS, BACK_OFF_S, LiveConnections, accept_connections

pytestmark = pytest.mark.live


@contextmanager
def listening(backlog=512):
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as listener:
        listener.settimeout(0)
        yield listener


@contextmanager
def clients(listener, count):
    """So many completed connections, in the kernel's backlog."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(listener.getsockname(), timeout=5))
            for _ in range(count)
        ]


class Flaky:
    """A listener that fails as told before it does its work."""

    def __init__(self, listener, *errors):
        self.listener = listener
        self.errors = [OSError(number, "scripted") for number in errors]
        self.accepts_at = []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.listener.close()

    def fileno(self):
        return self.listener.fileno()

    def accept(self):
        self.accepts_at.append(trio.current_time())
        if self.errors:
            raise self.errors.pop(0)
        return self.listener.accept()


class Passes(trio.abc.Instrument):
    """Counts the passes of the event loop."""

    count = 0

    def after_io_wait(self, timeout):  # noqa: ARG002 (Trio passes it)
        self.count += 1


async def test_all_that_are_ready_come_in_one_pass_up_to_the_bound():
    count = 2 * ACCEPTS_PER_PASS + 1
    accepted_at, passes, done = [], Passes(), trio.Event()

    def start(sock):
        sock.close()
        accepted_at.append(passes.count)
        if len(accepted_at) == count:
            done.set()

    with trio.fail_after(5), listening() as listener, clients(listener, count):
        trio.lowlevel.add_instrument(passes)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept_connections, listener, start)
            await done.wait()
            nursery.cancel_scope.cancel()
        trio.lowlevel.remove_instrument(passes)
    by_pass = [accepted_at.count(number) for number in sorted(set(accepted_at))]
    assert by_pass == [ACCEPTS_PER_PASS, ACCEPTS_PER_PASS, 1]


async def test_the_port_is_closed_with_the_end_of_accepting():
    with listening() as listener:
        address = listener.getsockname()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept_connections, listener, socket.socket.close)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


@pytest.mark.parametrize("at", range(12))
async def test_no_accepted_socket_is_lost_when_it_is_cancelled_at_any_point(at):
    """Cancelled before the first accept, between bursts, in a pause, after the last.

    In every case each client sees the end: what the kernel still had is reset with the
    listener, and what was accepted is with its owner.
    """
    owned = []
    numbers = [errno.ECONNABORTED, errno.EMFILE] if at % 2 else []
    with trio.fail_after(5), listening() as listener, clients(listener, 150) as peers:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept_connections, Flaky(listener, *numbers), owned.append)
            for _ in range(at):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        for sock in owned:
            sock.close()
        for peer in peers:
            peer.settimeout(1)
            with (
                pytest.raises(ConnectionResetError) if peer in peers[len(owned) :] else ExitStack()
            ):
                assert peer.recv(1) == b""


async def test_a_socket_that_cannot_be_started_is_closed_and_the_error_raised():
    def start(sock):
        raise RuntimeError("no nursery")

    with trio.fail_after(5), listening() as listener, clients(listener, 1) as (client,):
        with pytest.raises(RuntimeError, match="no nursery"):
            await accept_connections(listener, start)
        assert client.recv(1) == b""


@pytest.mark.parametrize("number", sorted(accept._LOST), ids=errno.errorcode.get)
async def test_a_connection_lost_while_it_waited_is_nothing(number, caplog):
    owned = []
    with trio.fail_after(5), listening() as listener, clients(listener, 1) as (client,):
        flaky = Flaky(listener, number, number)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept_connections, flaky, owned.append)
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.cancel_scope.cancel()
        (sock,) = owned
        with sock:
            assert sock.getpeername() == client.getsockname()
    assert not caplog.records


@pytest.mark.parametrize("number", sorted(accept._NO_ROOM), ids=errno.errorcode.get)
async def test_a_machine_without_room_is_a_pause_and_one_line(number, caplog, autojump_clock):
    done = trio.Event()

    def start(sock):
        sock.close()
        done.set()

    with listening() as listener, clients(listener, 1):
        flaky = Flaky(listener, number, number, number)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept_connections, flaky, start)
            await done.wait()
            nursery.cancel_scope.cancel()
    assert flaky.accepts_at[:4] == pytest.approx([i * BACK_OFF_S for i in range(4)])
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_each_shortage_is_said_again(caplog, autojump_clock):
    with listening() as listener:
        flaky = Flaky(listener)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept_connections, flaky, socket.socket.close)
            for _ in range(2):
                flaky.errors.append(OSError(errno.EMFILE, "scripted"))
                with clients(listener, 1):
                    await trio.sleep(1)
            nursery.cancel_scope.cancel()
    assert len(caplog.records) == 2


async def test_a_broken_listener_raises():
    with (
        trio.fail_after(5),
        listening() as listener,
        clients(listener, 1),
        pytest.raises(OSError, match="scripted"),
    ):
        await accept_connections(Flaky(listener, errno.EIO), socket.socket.close)


class Stream:
    """What the count needs of a connection."""

    def __init__(self):
        self.causes = []

    def abort(self, cause):
        self.causes.append(cause)


def test_a_connection_over_the_bound_is_reset_until_another_leaves(caplog):
    live = LiveConnections(2)
    one, two, three, four = Stream(), Stream(), Stream(), Stream()
    assert live.admit(one)
    assert live.admit(two)
    assert not live.admit(three)
    assert not live.admit(three)
    assert three.causes == [CancelCause.SHUTDOWN] * 2
    assert len(caplog.records) == 1
    live.remove(one)
    assert live.admit(four)
    assert not live.admit(three)
    assert len(caplog.records) == 2
    live.abort_all()
    assert [stream.causes for stream in (one, two, four)] == [
        [], [CancelCause.SHUTDOWN], [CancelCause.SHUTDOWN],
    ]  # fmt: skip


async def test_waiting_for_the_last_connection_ends_with_it():
    live, stream = LiveConnections(2), Stream()
    await live.wait_empty()
    live.admit(stream)
    with trio.move_on_after(0.01) as patience:
        await live.wait_empty()
    assert patience.cancelled_caught
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(live.wait_empty)
            await trio.testing.wait_all_tasks_blocked()
            live.remove(stream)
