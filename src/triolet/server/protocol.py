"""Hypercorn's protocol code as a connection uses it: HTTP/1.1 that may turn into another.

HTTP/1.1 and WebSocket are nearly used as they are. An HTTP/1.1 response that the app leaves
unfinished already ends as it must: the connection closes without the terminating chunk. A
WebSocket handshake that Hypercorn itself refuses is ended on both sides, see
:mod:`triolet.server.refusal`. HTTP/2 is in :mod:`triolet.server.http2`.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import h2.exceptions
import h11
import trio
import trio.lowlevel
import wsproto.utilities
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H2CProtocolRequiredError, H2ProtocolAssumedError, H11Protocol
from hypercorn.trio.tcp_server import MAX_RECV
from priority.priority import PriorityError

from triolet.server.http2 import Http2, Limits
from triolet.server.refusal import dismiss, error_answer, explained, parse_refusal, refused

if TYPE_CHECKING:
    from hypercorn.protocol.events import Event as StreamEvent
    from hypercorn.protocol.h2 import H2Protocol

#: What a client can make the parsers raise beyond what they handle themselves: no news.
PEER_ERRORS = (
    h2.exceptions.H2Error,
    h11.RemoteProtocolError,
    PriorityError,
    wsproto.utilities.RemoteProtocolError,
    UnicodeError,
)

#: Bytes that may wait behind a request for its response. A few pipelined requests fit; beyond
#: them the client's leaving is noticed only when the response is over.
HELD_BYTES = 65_536


class Resumed(Event):
    """The response is complete: bytes held behind its request may be looked at."""


class _HeldError(Exception):
    """Bytes of a next request have to wait for the present one's response."""


class ReadGate:
    """Where Hypercorn makes the reader wait while a next request is held behind this one.

    It stands in for Hypercorn's event, but sends the waiting reader back to the socket instead:
    else one byte too many behind a request would hide that the client has left. ``reading`` is
    what the reader waits in, and is cancelled when there is something to resume.
    """

    def __init__(self) -> None:
        self.holding = False
        self.resumable = False
        self.reading: trio.CancelScope | None = None

    async def clear(self) -> None:  # noqa: ASYNC910 (a ``set`` must not come before ``wait``)
        """Note that bytes are held."""
        self.holding = True

    async def wait(self) -> None:
        """Send the reader back.

        Raises:
            _HeldError: always.
        """
        raise _HeldError

    async def set(self) -> None:  # noqa: ASYNC910 (Hypercorn's own has no checkpoint either)
        """Wake the reader for what was held, if anything was."""
        if self.holding:
            self.holding, self.resumable = False, True
            if self.reading is not None:
                self.reading.cancel("the response before is complete")

    def is_set(self) -> bool:
        """Whether nothing is held."""
        return not self.holding

    def take(self) -> bool:
        """Whether there is something to resume; once."""
        resumable, self.resumable = self.resumable, False
        return resumable


class Http1(H11Protocol):
    """Hypercorn's HTTP/1.1; it holds bytes without the reader, and says what it refuses."""

    can_read: ReadGate

    async def handle(self, event: Event) -> None:
        """Take bytes, the end of the connection, or leave to look at bytes that were held."""
        try:
            if isinstance(event, Resumed):
                await self._handle_events()
            else:
                await super().handle(event)
        except _HeldError:
            await trio.lowlevel.checkpoint()

    async def stream_send(self, event: StreamEvent) -> None:  # noqa: ASYNC910 (super's)
        """Take one event of a response, as Hypercorn does; its own errors get a body."""
        if isinstance(event, Response) and (said := explained(event, self.stream)):
            said[0].headers.append((b"connection", b"close"))
            for part in said:
                await super().stream_send(part)
        else:
            await super().stream_send(event)

    async def _send_error_response(self, status_code: int) -> None:
        headers, content = error_answer(parse_refusal(status_code))
        headers += [(b"connection", b"close"), *self.config.response_headers("h11")]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=content))
        await self._send_h11_event(h11.EndOfMessage())


class Protocol(ProtocolWrapper):
    """Hypercorn's choice between HTTP/1.1 and HTTP/2, made between ours."""

    protocol: H11Protocol | H2Protocol

    def __init__(self, *hypercorn: Any, limits: Limits) -> None:  # noqa: ANN401 (just handed on)
        """Take what Hypercorn's own takes, and what one client may cost."""
        super().__init__(*hypercorn)
        self.gate = ReadGate()
        self._limits = limits
        self.protocol = Http1(*hypercorn)
        self.protocol.can_read = self.gate

    def start_http2(self) -> H2Protocol:
        """Switch to HTTP/2; the caller initiates it."""
        self.protocol = Http2(self, self._limits)
        return self.protocol

    async def handle(self, event: Event) -> None:
        """Take bytes or the end of the connection; HTTP/1.1 may turn into HTTP/2 by it."""
        try:
            await self.protocol.handle(event)
            if isinstance(self.protocol, H11Protocol) and refused(self.protocol.stream):
                stream, self.protocol.stream = self.protocol.stream, None
                await dismiss(stream)
                await self.send(Closed())
        except H2ProtocolAssumedError as prior_knowledge:
            await self.start_http2().initiate()
            # Hypercorn took the preface for a request. Nothing else would end a client that
            # sends no more than that.
            await self.send(Updated(idle=True))
            rest = prior_knowledge.data
        except H2CProtocolRequiredError as upgrade:
            await self.start_http2().initiate(upgrade.headers, upgrade.settings)
            rest = upgrade.data
        else:
            return
        if rest:
            await self.protocol.handle(RawData(rest))

    def awaits_body(self) -> bool:
        """Whether an HTTP/1.1 client has sent a part of a request and owes the rest."""
        return (
            isinstance(self.protocol, H11Protocol)
            and self.protocol.connection.their_state is h11.SEND_BODY
        )

    def room(self) -> int:
        """Bytes that may be read now; 0 while enough is held behind a request."""
        if not self.gate.holding or not isinstance(self.protocol, H11Protocol):
            return MAX_RECV
        return min(MAX_RECV, max(0, HELD_BYTES - len(self.protocol.connection.trailing_data[0])))

    def read_deadline(self) -> float:
        """Until when to wait for the next bytes, in Trio's time."""
        if isinstance(self.protocol, Http2):
            return self.protocol.body_due()
        return trio.current_time() + self._limits.read_timeout_s if self.awaits_body() else inf

    async def read_too_late(self) -> bool:
        """Give up what the deadline was for; ``False`` if that is the connection."""
        if isinstance(self.protocol, Http2):
            await self.protocol.give_up_bodies()
            return True
        await trio.lowlevel.checkpoint()
        return False
