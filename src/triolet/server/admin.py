"""Health, readiness, metrics, version and the list of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.routing import Route

from triolet import __version__
from triolet.errors import EngineDownError, ModelNotFoundError
from triolet.observe.metrics import Metrics
from triolet.runtime.lifecycle import Phase, Runtime
from triolet.server.http import JsonResponse, error_response

if TYPE_CHECKING:
    from starlette.requests import Request


@attrs.frozen(eq=False)
class Admin:
    """The routes that tell about the server and never generate."""

    runtime: Runtime
    metrics: Metrics

    def routes(self) -> list[Route]:
        """All routes of this object."""
        return [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.show_metrics),
            Route("/version", self.version),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
        ]

    async def health(self, _: Request) -> Response:
        """200 while the process does what it should; 503 when only a restart helps."""
        if self.runtime.healthy:
            return JsonResponse({"status": "ok", "phase": self.runtime.phase.value})
        return error_response(EngineDownError("The engine has stopped."))

    async def ready(self, _: Request) -> Response:
        """200 while new requests are taken."""
        if self.runtime.phase is Phase.READY and self.runtime.healthy:
            return JsonResponse({"status": "ready"})
        return error_response(self.runtime.refusal())

    async def show_metrics(self, _: Request) -> Response:
        """Prometheus text."""
        return Response(self.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def version(self, _: Request) -> Response:
        """Triolet's version."""
        return JsonResponse({"version": __version__})

    async def models(self, _: Request) -> Response:
        """OpenAI's list of models."""
        return JsonResponse({"object": "list", "data": self._models()})

    async def model(self, request: Request) -> Response:
        """One model of the list."""
        name = request.path_params["model"]
        for model in self._models():
            if model["id"] == name:
                return JsonResponse(model)
        raise ModelNotFoundError(f"The model {name[:100]!r} is not served here.", param="model")

    def _models(self) -> list[dict[str, object]]:
        info = self.runtime.model
        if info is None:
            return []
        return [
            {
                "id": name,
                "object": "model",
                "created": info.created,
                "owned_by": "triolet",
                "max_model_len": info.max_model_len,
            }
            for name in info.names
        ]
