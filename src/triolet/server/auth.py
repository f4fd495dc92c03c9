"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
from starlette.datastructures import Headers
from starlette.types import ASGIApp

from triolet.errors import AuthenticationError
from triolet.server.http import error_response

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

#: The paths that need a key. Health, readiness and metrics are for the machine's own probes.
PROTECTED_PREFIXES = ("/v1/", "/tokenize", "/detokenize")


@attrs.frozen
class AuthMiddleware:
    """Refuses requests without one of the keys. With no keys configured, lets all through."""

    app: ASGIApp
    keys: tuple[str, ...]
    #: Told of every refusal.
    on_rejected: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        guarded = self.keys and scope["type"] == "http" and _is_protected(scope)
        if guarded and not self._knows(Headers(scope=scope).get("authorization", "")):
            self.on_rejected()
            error = AuthenticationError("Send one of the server's API keys as a bearer token.")
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _knows(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return False
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        # Every key is compared, each in constant time: neither which key nor how much of it
        # matched shows in the time taken.
        matches = [
            hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest()) for key in self.keys
        ]
        return any(matches)


def _is_protected(scope: Scope) -> bool:
    # The router may take the path with the root path or without it: either way needs a key.
    path: str = scope["path"]
    inner = path.removeprefix(scope.get("root_path", ""))
    return path.startswith(PROTECTED_PREFIXES) or inner.startswith(PROTECTED_PREFIXES)
