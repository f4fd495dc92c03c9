"""Health, readiness, metrics, version and the list of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from triolet import __version__
from triolet.errors import ModelNotFoundError
from triolet.observe.metrics import Metrics
from triolet.runtime.lifecycle import Phase, Runtime
from triolet.server.http import JsonResponse, error_response
from triolet.wire.models import model_body, model_list

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


@attrs.frozen
class _Plain:
    """An ASGI app around a function that cannot block. Starlette would give it a thread."""

    answer: Callable[[Request], Response]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(Request(scope, receive))(scope, receive, send)


@attrs.frozen(eq=False)
class Admin:
    """The routes that tell about the server and never generate."""

    runtime: Runtime
    metrics: Metrics

    def routes(self) -> list[Route]:
        """All routes of this object."""
        return [
            Route(path, _Plain(answer), methods=["GET"])
            for path, answer in (
                ("/health", self.health),
                ("/ready", self.ready),
                ("/metrics", self.show_metrics),
                ("/version", self.version),
                ("/v1/models", self.models),
                ("/v1/models/{model:path}", self.model),
            )
        ]

    def health(self, _: Request) -> Response:
        """200 while the process does what it should; 503 when only a restart helps."""
        if self.runtime.healthy:
            return JsonResponse({"status": "ok", "phase": self.runtime.phase.value})
        return error_response(self.runtime.refusal())

    def ready(self, _: Request) -> Response:
        """200 while new requests are taken."""
        if self.runtime.phase is Phase.READY and self.runtime.healthy:
            return JsonResponse({"status": "ready"})
        return error_response(self.runtime.refusal())

    def show_metrics(self, _: Request) -> Response:
        """Prometheus text."""
        return Response(self.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def version(self, _: Request) -> Response:
        """Triolet's version."""
        return JsonResponse({"version": __version__})

    def models(self, _: Request) -> Response:
        """OpenAI's list of models; empty while the model is still loading."""
        info = self.runtime.model
        return JsonResponse(model_list() if info is None else model_list(info))

    def model(self, request: Request) -> Response:
        """One model of the list."""
        name = request.path_params["model"]
        info = self.runtime.model
        if info is None or name not in info.names:
            raise ModelNotFoundError(f"The model {name[:100]!r} is not served here.", param="model")
        return JsonResponse(model_body(info, name))
