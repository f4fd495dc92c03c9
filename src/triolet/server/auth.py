"""API keys, and whose request it is: :data:`TENANT_KEY` in the scope's state.

A tenant is named by the beginning of its key's digest: enough to tell keys apart, useless as
a key, and the same on every server. Where no keys are configured everyone is the one tenant "".
"""

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
#: Where a request finds its tenant: ``scope["state"][TENANT_KEY]``.
TENANT_KEY = "tenant"
#: 64 bits: two of a few keys share them by chance once in 10**17 pairs.
TENANT_HEX_DIGITS = 16


@attrs.frozen
class AuthMiddleware:
    """Refuses requests without one of the keys. With no keys configured, lets all through."""

    app: ASGIApp
    keys: tuple[str, ...]
    #: Told of every refusal.
    on_rejected: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "http":
            tenant: str | None = ""
            if self.keys and _is_protected(scope):
                tenant = self._tenant(Headers(scope=scope).get("authorization", ""))
            if tenant is None:
                self.on_rejected()
                error = AuthenticationError("Send one of the server's API keys as a bearer token.")
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})[TENANT_KEY] = tenant
        await self.app(scope, receive, send)

    def _tenant(self, authorization: str) -> str | None:
        """Whose key this is; ``None`` if it is none of ours."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        # Every key is compared, each in constant time: neither which key nor how much of it
        # matched shows in the time taken.
        matches = [
            hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest()) for key in self.keys
        ]
        return digest.hex()[:TENANT_HEX_DIGITS] if any(matches) else None


def _is_protected(scope: Scope) -> bool:
    # The router may take the path with the root path or without it: either way needs a key.
    path: str = scope["path"]
    inner = path.removeprefix(scope.get("root_path", ""))
    return path.startswith(PROTECTED_PREFIXES) or inner.startswith(PROTECTED_PREFIXES)
