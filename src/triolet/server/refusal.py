"""Refusals that no app sees: what Hypercorn answers by itself, with a body that says why."""

from __future__ import annotations

import secrets
import sys
from types import MappingProxyType
from typing import TypeGuard

import trio.lowlevel
from hypercorn.protocol.events import Body, Response
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.protocol.ws_stream import WSStream

from triolet.errors import InvalidRequestError, TrioletError
from triolet.wire.codec import encode
from triolet.wire.common import error_body

#: The close code of a WebSocket that ended without a close frame (RFC 6455, 7.4.1).
ABNORMAL_CLOSURE = 1006

#: How Hypercorn's own answers begin, and no app's: a length of nothing and a close.
BARE_HEADERS = [(b"content-length", b"0"), (b"connection", b"close")]

_SERVER_ERRORS = 500

#: By status: what Hypercorn answers in place of an app.
_ANSWERS = MappingProxyType({
    400: "The WebSocket handshake is malformed, or frames came before it was accepted.",
    403: "There is no WebSocket here; use an HTTP request.",
    404: "There is nothing here under this host name.",
})

#: By status: what h11 refuses before there is a request.
_REFUSALS = MappingProxyType({
    431: "The request line and headers are longer than this server takes.",
    501: "The only Transfer-Encoding this server takes is chunked.",
})

#: By how h11 begins to say it; it goes on with the client's bytes, which are not repeated.
_REASONS = MappingProxyType({
    "illegal request line": "The request line is malformed.",
    "illegal target": "The request target has characters that must be escaped.",
    "illegal header": "A header is malformed.",
    "continuation line": "A header is malformed.",
    "missing mandatory host": "The Host header is missing.",
    "found multiple host": "There is more than one Host header.",
    "bad content-length": "The Content-Length header is malformed.",
    "conflicting content-length": "There are Content-Length headers that contradict each other.",
    "illegal chunk": "The chunked body is malformed.",
    "malformed chunk": "The chunked body is malformed.",
})


def error_answer(error: TrioletError) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of an error after which the connection closes."""
    content = encode(error_body(error))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(content)),
        (b"x-request-id", secrets.token_hex(16).encode("ascii")),
    ]
    return headers, content


def parse_refusal(status: int) -> TrioletError:
    """The error for what h11 is being refused for; called where its exception is handled."""
    said = str(sys.exception()).lower()
    message = _REFUSALS.get(status) or next(
        (reason for beginning, reason in _REASONS.items() if said.startswith(beginning)),
        "The request is not valid HTTP/1.1.",
    )
    return InvalidRequestError(message)


def explained(
    event: Response, stream: HTTPStream | WSStream | None
) -> tuple[Response] | tuple[Response, Body] | None:
    """An answer of Hypercorn's own with a body; ``None`` if ``event`` is an app's answer."""
    if list(event.headers) != BARE_HEADERS:
        return None
    if event.status_code >= _SERVER_ERRORS:
        error = TrioletError("The server made a mistake; this has been logged.")
    else:
        error = InvalidRequestError(_ANSWERS.get(event.status_code, "The request was refused."))
    headers, content = error_answer(error)
    answer = Response(stream_id=event.stream_id, headers=headers, status_code=event.status_code)
    if isinstance(stream, HTTPStream) and stream.scope["method"] == "HEAD":
        return (answer,)
    return answer, Body(stream_id=event.stream_id, data=content)


def refused(stream: HTTPStream | WSStream | None) -> TypeGuard[WSStream]:
    """Whether Hypercorn itself has answered this WebSocket handshake with an error.

    It then counts the stream as closed, but neither removes it nor tells an app that it had
    started already: connection and app would wait for ever.
    """
    return isinstance(stream, WSStream) and stream.closed


async def dismiss(stream: WSStream) -> None:
    """Tell the app of a refused WebSocket that it is over."""
    if stream.app_put is None:
        await trio.lowlevel.checkpoint()
    else:
        await stream.app_put({"type": "websocket.disconnect", "code": ABNORMAL_CLOSURE})
