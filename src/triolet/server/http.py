"""HTTP without routes: bodies with a limit, errors as responses, the request's id."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING

import attrs
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp

from triolet.errors import (
    AuthenticationError,
    BodyTooLargeError,
    MediaTypeError,
    MethodNotAllowedError,
    NotFoundError,
    RequestTimeoutError,
    TrioletError,
)
from triolet.runtime.arrival import ClientDisconnectedError
from triolet.wire.codec import encode
from triolet.wire.common import error_body

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.types import Message, Receive, Scope, Send

#: A body over the limit is read and thrown away up to here, so that a client that writes all
#: before it reads sees the 413 and can go on using the connection. Beyond it we hang up.
DISCARD_LIMIT_BYTES = 64 * 1024 * 1024


class JsonResponse(Response):
    """A complete JSON body, encoded by the one codec."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Encode the body."""
        return encode(content)


def error_response(error: TrioletError) -> JsonResponse:
    """The HTTP answer to an error that came before the first byte of a response."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, RequestTimeoutError):
        # A deadline that passed once will pass again: keep SDKs from trying.
        headers["x-should-retry"] = "false"
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    return JsonResponse(error_body(error), status_code=error.status, headers=headers)


def handler(
    answer: Callable[[Request, Exception], Response],
) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Make an exception handler of a function that cannot block; Starlette would thread it."""

    async def handle(request: Request, error: Exception) -> Response:  # noqa: ASYNC124 - it must be async
        return answer(request, error)  # noqa: ASYNC910 - so that nothing can delay an error

    return handle


def on_triolet_error(_: Request, error: Exception) -> Response:
    """The answer to our own errors."""
    assert isinstance(error, TrioletError)  # noqa: S101 - registered for this class only
    return error_response(error)


def on_http_exception(request: Request, error: Exception) -> Response:
    """The answer to what Starlette's router refuses: unknown paths and wrong methods."""
    http_error: HTTPException = error  # type: ignore[assignment] # registered for this class only
    path = request.url.path[:100]
    if http_error.status_code == MethodNotAllowedError.status:
        response = error_response(
            MethodNotAllowedError(f"{request.method} is not allowed on {path}.")
        )
        response.headers.update(http_error.headers or {})
        return response
    if http_error.status_code == NotFoundError.status:
        return error_response(NotFoundError(f"There is no {request.method} {path}."))
    return JsonResponse(
        error_body(TrioletError(http_error.detail)), status_code=http_error.status_code
    )


def on_exception(request: Request, _: Exception) -> Response:
    """The answer to bugs. Starlette raises the error again, so that it is logged."""
    response = error_response(TrioletError("The server made a mistake; this has been logged."))
    # This handler alone answers outside of all middleware.
    request_id = request.scope.get("state", {}).get("request_id")
    if request_id is not None:
        response.headers["X-Request-Id"] = request_id
    return response


async def read_body(scope: Scope, receive: Receive, *, limit_bytes: int) -> bytes:
    """The whole JSON body of a request.

    Raises:
        MediaTypeError: The body is declared as something other than JSON.
        BodyTooLargeError: The body is longer than the limit.
        ClientDisconnectedError: The client left in the middle of it.
    """
    headers = Headers(scope=scope)
    media_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    declared = headers.get("content-length", "")
    discard_limit = max(DISCARD_LIMIT_BYTES, limit_bytes)
    if declared.isdecimal() and int(declared) > discard_limit:
        raise _too_large(limit_bytes)
    chunks: list[bytes] = []
    received = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        chunk = message.get("body", b"")
        received += len(chunk)
        if received <= limit_bytes:
            chunks.append(chunk)
        else:
            chunks.clear()
        if received > discard_limit or not message.get("more_body", False):
            break
    if received > limit_bytes:
        raise _too_large(limit_bytes)
    if media_type != "application/json":
        raise MediaTypeError(
            f"The body must be JSON (Content-Type: application/json), not {media_type[:100]!r}."
        )
    return b"".join(chunks)


def _too_large(limit_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body is longer than {limit_bytes} bytes, the server's limit.")


@attrs.frozen
class RequestIdMiddleware:
    """Gives every request an unguessable id and says it in ``X-Request-Id``.

    WebSocket handshakes are refused here, as a path that does not exist: no route speaks it.
    """

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        # 128 random bits: the id alone must not let anyone guess another's.
        state["request_id"] = secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if message["type"] in {"http.response.start", "websocket.http.response.start"}:
                MutableHeaders(scope=message).setdefault("X-Request-Id", state["request_id"])
            await send(message)

        if scope["type"] == "websocket":
            error = NotFoundError(f"There is no WebSocket at {scope['path'][:100]}.")
            await refuse_websocket(error, scope, receive, send_with_id)
        else:
            await self.app(scope, receive, send_with_id)


async def refuse_websocket(error: TrioletError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a WebSocket handshake with an HTTP error, or close it where the server cannot."""
    await receive()  # the handshake
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close"})
        return
    response = error_response(error)
    start = {"status": response.status_code, "headers": response.raw_headers}
    await send({"type": "websocket.http.response.start", **start})
    await send({"type": "websocket.http.response.body", "body": response.body})


@attrs.frozen
class RootPathMiddleware:
    """Serves every route under a prefix too, for proxies that do not strip theirs."""

    app: ASGIApp
    root_path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if self.root_path and not scope.get("root_path"):
            scope["root_path"] = self.root_path
        await self.app(scope, receive, send)
