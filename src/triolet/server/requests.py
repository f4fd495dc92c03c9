"""``POST /v1/requests/{id}/cancel``: end a request from anywhere.

Rules:

1. The id is the one in a response's body and in its ``X-Request-Id``. As it is told with the first
   byte of a response, a request that is still read or tokenized has none that a client could name.
2. Only who made a request may cancel it. To everyone else it does not exist.
3. It is idempotent: for a request that has ended, by whatever, the answer says how, as long as
   the server remembers.
4. The answer comes when the request has ended and the engine was told; the cancel itself waits
   for nothing, the caller's own body included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio
from starlette.requests import Request
from starlette.routing import Route

from triolet.core import CancelCause, RequestId
from triolet.errors import NotFoundError
from triolet.observe.metrics import Metrics
from triolet.runtime.lifecycle import Runtime
from triolet.runtime.registry import Ended
from triolet.runtime.request import RequestHandle
from triolet.server.auth import TENANT_KEY
from triolet.server.http import JsonResponse

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

#: What is read of a body that says nothing, so that the connection can be used again: bytes and
#: seconds. Clients send none, or ``{}``.
MAX_BODY_BYTES, MAX_BODY_S = 64 * 1024, 5.0


@attrs.frozen(eq=False)
class RequestRoutes:
    """The routes about single requests."""

    runtime: Runtime
    metrics: Metrics

    def routes(self) -> list[Route]:
        """All routes of this object."""
        return [Route("/v1/requests/{id}/cancel", _CancelApp(self), methods=["POST"])]

    def cancel(self, request_id: RequestId, owner: str) -> RequestHandle | Ended | None:
        """End an owner's request for the client, wherever it is.

        Returns:
            What is ending now, or has ended before; ``None`` if it is unknown, forgotten or
            another's.
        """
        found = self.runtime.find(request_id, owner)
        if isinstance(found, RequestHandle) and found.cancel(CancelCause.CLIENT_CANCEL):
            return found
        if found is not None:
            self.metrics.cancelled_late()
        return found


@attrs.frozen
class _CancelApp:
    """An ASGI app. Errors are answered by the application's handlers."""

    of: RequestRoutes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Cancel one request."""
        request_id = RequestId(Request(scope).path_params["id"])
        found = self.of.cancel(request_id, scope["state"][TENANT_KEY])
        await _skip_body(receive)
        if found is None:
            raise NotFoundError(f"There is no request {request_id[:100]!r}.")
        end = found if isinstance(found, Ended) else await found.wait_ended()
        body = {
            "id": request_id,
            "object": "request",
            "status": end.outcome.partition(":")[0],
            "outcome": end.outcome,
        }
        await JsonResponse(body)(scope, receive, send)


async def _skip_body(receive: Receive) -> None:  # noqa: ASYNC910 - receive() is one, or cancelled
    with trio.move_on_after(MAX_BODY_S):
        message = await receive()
        left = MAX_BODY_BYTES - len(message.get("body", b""))
        while left > 0 and message.get("more_body", False):
            message = await receive()
            left -= len(message.get("body", b""))
