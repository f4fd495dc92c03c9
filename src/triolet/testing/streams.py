"""Byte streams that misbehave on purpose.

A fault is a frozen value that says what happens at which byte, so a schedule of faults can be
drawn from a seed, printed and played again. :class:`FaultyStream` plays the faults of each
direction on any Trio stream. Waiting is ``trio.sleep``, so on a mock clock it takes no time.

Nothing here is particular to Triolet.

Rules of :class:`FaultyStream`:

1. A direction counts the bytes that have passed. A fault ``at`` n happens after byte n and
   before byte n + 1: as soon as byte n has passed for those that end something, else once
   somebody wants byte n + 1.
2. A fault of one direction that ends both (:class:`Reset`, :class:`Cut`) wakes whoever waits in
   the other.
3. Faults that only take time change no byte and lose none.
4. Every operation is a checkpoint, and ``Cancelled`` passes: a cancelled send may have passed
   some of its bytes, as with a socket.
"""

from __future__ import annotations

import inspect
import socket
import struct
from contextlib import contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import trio
import trio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Buffer: TypeAlias = bytes | bytearray | memoryview

#: l_onoff = 1, l_linger = 0: closing discards unsent bytes and sends a reset.
_LINGER_RESET = struct.pack("ii", 1, 0)


def _not_negative(_: object, attribute: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None and not value >= 0:
        raise ValueError(f"{attribute.name} must be 0 or more, not {value:g}")


def _positive(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if not value > 0:
        raise ValueError(f"{attribute.name} must be above 0, not {value:g}")


@attrs.frozen
class Delay:
    """From byte ``at`` on, each piece that passes takes this long: a slow network."""

    seconds: float = attrs.field(validator=_not_negative)
    at: int = attrs.field(default=0, validator=_not_negative)


@attrs.frozen
class Stall:
    """At byte ``at`` nothing passes for so long, or never again: a peer that is stuck."""

    at: int = attrs.field(default=0, validator=_not_negative)
    #: ``None`` is for ever.
    seconds: float | None = attrs.field(default=None, validator=_not_negative)


@attrs.frozen
class Dribble:
    """From byte ``at`` on, a piece has at most so many bytes. One makes a parser work."""

    bytes_per_piece: int = attrs.field(default=1, validator=_positive)
    at: int = attrs.field(default=0, validator=_not_negative)


@attrs.frozen
class Reset:
    """At byte ``at`` the connection breaks for both ends and in both directions."""

    at: int = attrs.field(default=0, validator=_not_negative)


@attrs.frozen
class HalfClose:
    """At byte ``at`` this direction ends; what is sent beyond never arrives. The other goes on."""

    at: int = attrs.field(default=0, validator=_not_negative)


@attrs.frozen
class Cut:
    """At byte ``at`` the connection closes: the peer reads its end, and sends into nothing."""

    at: int = attrs.field(default=0, validator=_not_negative)


#: What can happen to one direction of a stream.
Fault: TypeAlias = Delay | Stall | Dribble | Reset | HalfClose | Cut

_KINDS: dict[str, type[Fault]] = {
    kind.__name__: kind for kind in (Delay, Stall, Dribble, Reset, HalfClose, Cut)
}


def fault_to_json(fault: Fault) -> dict[str, object]:
    """A fault as JSON: its fields, and its name under ``fault``."""
    return {"fault": type(fault).__name__, **attrs.asdict(fault)}


def fault_from_json(written: dict[str, Any]) -> Fault:
    """The fault that :func:`fault_to_json` wrote.

    Raises:
        ValueError: There is no such fault, or its fields do not fit.
    """
    fields = dict(written)
    kind = _KINDS.get(fields.pop("fault", ""))
    if kind is None:
        raise ValueError(f"a fault is one of {', '.join(_KINDS)}, not {written.get('fault')!r}")
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(str(error)) from error


class _Lane:
    """One direction: how far it is and what is still to happen."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        faults = tuple(faults)
        self.passed = 0
        self._shapes = [one for one in faults if isinstance(one, Delay | Dribble)]
        self._events = sorted(
            (one for one in faults if not isinstance(one, Delay | Dribble)),
            key=lambda one: one.at,
        )

    def due(self) -> Stall | Reset | HalfClose | Cut | None:
        """What happens here, without taking note of it."""
        if self._events and self._events[0].at <= self.passed:
            return self._events[0]
        return None

    def ends(self) -> bool:
        """Whether something ends here."""
        due = self.due()
        return due is not None and not isinstance(due, Stall)

    def happened(self) -> None:
        """What was due is over."""
        del self._events[0]

    def room(self) -> int | None:
        """Bytes of the next piece at most: up to the next fault; ``None`` without a limit."""
        ahead = [one.at - self.passed for one in (*self._events, *self._shapes)]
        limits = [distance for distance in ahead if distance > 0]
        limits += [
            one.bytes_per_piece
            for one in self._shapes
            if isinstance(one, Dribble) and one.at <= self.passed
        ]
        return min(limits, default=None)

    def delay_s(self) -> float:
        """Seconds that the next piece takes."""
        return sum(
            one.seconds for one in self._shapes if isinstance(one, Delay) and one.at <= self.passed
        )


class FaultyStream(trio.abc.HalfCloseableStream):
    """Any Trio stream, with faults. As with a socket, each direction is for one task at a time.

    Args:
        stream: What carries the bytes. :meth:`send_eof` and :class:`HalfClose` of the sending
            direction need a ``HalfCloseableStream``.
        sending: What happens to what is sent here.
        receiving: What happens to what is received here.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        *,
        sending: Iterable[Fault] = (),
        receiving: Iterable[Fault] = (),
    ) -> None:
        self.stream = stream
        self._sending = _Lane(sending)
        self._receiving = _Lane(receiving)
        #: Set when both directions have ended, however; wakes who waits in a fault.
        self._over = trio.Event()
        self._broken = self._closed = self._cut = False
        #: Directions that have ended by themselves.
        self._deaf = self._mute = False

    @property
    def sent_bytes(self) -> int:
        """Bytes that have passed out of here."""
        return self._sending.passed

    @property
    def received_bytes(self) -> int:
        """Bytes that have passed in here."""
        return self._receiving.passed

    async def send_all(self, data: Buffer) -> None:
        """Send all of ``data``, as the faults let it.

        Raises:
            trio.BrokenResourceError: The connection was reset or cut, by a fault or the peer.
            trio.ClosedResourceError: This end was closed.
        """
        await trio.lowlevel.checkpoint()
        view = memoryview(data)
        while True:
            await self._meet(self._sending)
            self._check(sending=True)
            if self._mute or not view:
                return
            await self._wait(self._sending.delay_s())
            self._check(sending=True)
            piece = view[: self._sending.room()]
            with self._translated():
                await self.stream.send_all(piece)
            self._sending.passed += len(piece)
            view = view[len(piece) :]
            if self._sending.ends():
                await self._end(self._sending)
            if not view:
                return

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Receive bytes, as the faults let them come; none at the end of the stream.

        Raises:
            trio.BrokenResourceError: The connection was reset, by a fault or the peer.
            trio.ClosedResourceError: This end was closed.
        """
        await trio.lowlevel.checkpoint()
        await self._meet(self._receiving)
        await self._wait(self._receiving.delay_s())
        self._check(sending=False)
        if self._at_end():
            return b""
        room = self._receiving.room()
        limits = [limit for limit in (room, max_bytes) if limit is not None]
        try:
            with self._translated():
                data = await self.stream.receive_some(min(limits, default=None))
        except trio.BrokenResourceError:
            if self._at_end():
                return b""
            raise
        self._receiving.passed += len(data)
        if self._receiving.ends():
            await self._end(self._receiving)
        return data

    async def wait_send_all_might_not_block(self) -> None:
        """See :meth:`trio.abc.SendStream.wait_send_all_might_not_block`; faults play no part."""
        self._check(sending=True)
        with self._translated():
            await self.stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """See :meth:`trio.abc.HalfCloseableStream.send_eof`.

        Raises:
            TypeError: The stream below cannot close one direction.
        """
        self._check(sending=True)
        with self._translated():
            await self._send_eof()

    async def aclose(self) -> None:
        """Close the stream below."""
        self._closed = True
        self._over.set()
        await self.stream.aclose()

    def close(self) -> None:
        """Close the stream below at once, where that is possible without waiting.

        Raises:
            TypeError: It is not.
        """
        close = getattr(self.stream, "close", None)
        if not callable(close) or inspect.iscoroutinefunction(close):
            raise TypeError(f"{type(self.stream).__name__} cannot be closed without waiting")
        self._closed = True
        self._over.set()
        close()

    def reset(self) -> None:
        """Break the connection at once, as :class:`Reset` does, for both ends.

        Raises:
            TypeError: The stream below has no reset; see :func:`reset_stream`.
        """
        self._broken = True
        self._over.set()
        reset_stream(self.stream)

    async def _meet(self, lane: _Lane) -> None:  # noqa: ASYNC910 - its callers have one
        """Let happen what is due before the next byte."""
        while (fault := lane.due()) is not None and not self._over.is_set():
            if isinstance(fault, Stall):
                await self._wait(inf if fault.seconds is None else fault.seconds)
                if self._over.is_set():
                    return
                lane.happened()
            else:
                await self._end(lane)

    async def _end(self, lane: _Lane) -> None:
        """Let happen what ends something here. A cancellation cannot keep bytes from the caller."""
        match lane.due():
            case Reset():
                self._broken = True
                self._over.set()
                await _break(self.stream)
            case Cut():
                self._cut = True
                self._over.set()
                await trio.aclose_forcefully(self.stream)
            case HalfClose() if lane is self._sending:
                self._mute = True
                await self._send_eof()
            case _:
                self._deaf = True
        lane.happened()
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def _wait(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await self._over.wait()

    async def _send_eof(self) -> None:
        if not isinstance(self.stream, trio.abc.HalfCloseableStream):
            raise TypeError(f"{type(self.stream).__name__} cannot close one direction")
        await self.stream.send_eof()

    def _at_end(self) -> bool:
        return self._deaf or self._cut

    def _check(self, *, sending: bool) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this stream was closed")
        if self._broken or (sending and self._cut):
            raise trio.BrokenResourceError("a fault ended this connection")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """A stream below that we closed for a fault is broken, not closed, to its user."""
        try:
            yield
        except trio.ClosedResourceError:
            if self._broken or self._cut:
                raise trio.BrokenResourceError("a fault ended this connection") from None
            raise


def reset_stream(stream: trio.abc.Stream) -> None:
    """Close a stream so that its peer sees an error instead of an end, without waiting.

    Works with the streams of this module and with sockets.

    Raises:
        TypeError: This kind of stream has no such end.
    """
    if isinstance(stream, trio.SocketStream):
        with suppress(OSError):
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        stream.socket.close()
    elif callable(reset := getattr(stream, "reset", None)):
        reset()
    else:
        raise TypeError(f"{type(stream).__name__} cannot be reset")


async def _break(stream: trio.abc.Stream) -> None:
    try:
        reset_stream(stream)
    except TypeError:
        await trio.aclose_forcefully(stream)
    await trio.lowlevel.cancel_shielded_checkpoint()
