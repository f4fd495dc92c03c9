"""The ASGI application: routes, middleware, error handlers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from triolet.config import read_api_keys
from triolet.core import EngineStatistics
from triolet.errors import TrioletError
from triolet.observe.metrics import Metrics, ServerState
from triolet.runtime.lifecycle import Phase, Runtime
from triolet.runtime.tokenizing import TokenizerGate
from triolet.server.admin import Admin
from triolet.server.auth import AuthMiddleware
from triolet.server.chat import ChatEndpoint
from triolet.server.completions import CompletionsEndpoint
from triolet.server.exchange import Endpoint, ExchangeOptions, GenerationApp
from triolet.server.http import (
    RequestIdMiddleware,
    RootPathMiddleware,
    handler,
    on_exception,
    on_http_exception,
    on_triolet_error,
)
from triolet.server.requests import RequestRoutes
from triolet.server.sampling import Policy
from triolet.server.tokenize import TokenizeRoutes

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Lifespan

    from triolet.config import Config
    from triolet.runtime.record import RequestRecord

_ErrorAnswer = Callable[["Request", Exception], "Response"]


def create_app(
    runtime: Runtime, config: Config, *, lifespan: Lifespan[Starlette] | None = None
) -> Starlette:
    """The whole HTTP surface of one server.

    Args:
        runtime: Not necessarily running yet; until it is ready, requests get 503.
        config: The server's settings.
        lifespan: What to do around the life of an ASGI server that is not ours.

    Raises:
        ConfigError: The file with API keys cannot be read.
    """
    metrics = Metrics(lambda: _state(runtime))
    runtime.on_record = lambda record: _count(metrics, record)
    keys = read_api_keys(config)
    if len(set(keys)) > 1:
        runtime.share_places()
    options = ExchangeOptions(
        max_body_bytes=config.max_body_size,
        commit_after_s=config.commit_after,
        keepalive_s=config.keepalive,
    )
    gate = TokenizerGate()
    policy = _policy(config)
    generating: dict[str, Endpoint] = {
        "/v1/chat/completions": ChatEndpoint(gate, policy),
        "/v1/completions": CompletionsEndpoint(gate, policy),
    }
    app = Starlette(
        routes=[
            *(
                Route(
                    path,
                    GenerationApp(endpoint, runtime, options),
                    methods=["POST"],
                )
                for path, endpoint in generating.items()
            ),
            *TokenizeRoutes(gate, runtime, options.max_body_bytes).routes(),
            *RequestRoutes(runtime, metrics).routes(),
            *Admin(runtime, metrics).routes(),
        ],
        middleware=[
            Middleware(RootPathMiddleware, root_path=config.root_path),
            Middleware(RequestIdMiddleware),
            Middleware(AuthMiddleware, keys=keys, on_rejected=metrics.rejected),
        ],
        exception_handlers={
            TrioletError: handler(_counted(on_triolet_error, metrics)),
            HTTPException: handler(_counted(on_http_exception, metrics)),
            Exception: handler(on_exception),
        },
        lifespan=lifespan,
    )
    # Starlette would redirect paths with a slash too many, without a word of JSON and to
    # whatever host the client named.
    app.router.redirect_slashes = False
    return app


def _policy(config: Config) -> Policy:
    return Policy(
        max_timeout_s=config.request_timeout,
        default_seed=config.seed,
        max_n=config.max_n,
        max_logprobs=config.max_logprobs,
        priorities=config.scheduling_policy == "priority",
        shared_prefixes=config.prefix_cache_scope == "server",
    )


def _counted(answer: _ErrorAnswer, metrics: Metrics) -> _ErrorAnswer:
    """Count what gets an error from the application: it has no record that would be counted."""

    def count_and_answer(request: Request, error: Exception) -> Response:
        metrics.rejected()
        return answer(request, error)

    return count_and_answer


def _state(runtime: Runtime) -> ServerState:
    backend = runtime.backend()
    return ServerState(
        engine=EngineStatistics() if backend is None else backend.statistics(),
        live_requests=runtime.live_requests,
        ready=runtime.phase is Phase.READY,
        queued_requests=runtime.queued_requests,
        queued_tokens=runtime.queued_tokens,
        paused_requests=runtime.paused_requests,
    )


def _count(metrics: Metrics, record: RequestRecord) -> None:
    first = record.first_token_ns
    admitted = record.admitted_ns
    # Who gave up in the queue has waited too, and the longest of all.
    begun = record.first_scheduled_ns or record.ended_ns
    metrics.ended(
        outcome=record.outcome,
        prompt_tokens=record.usage.prompt_tokens,
        output_tokens=record.usage.output_tokens,
        duration_s=(record.ended_ns - record.received_ns) / 1e9,
        first_token_s=None if first is None or admitted is None else (first - admitted) / 1e9,
        queue_s=None if admitted is None else max(0, begun - admitted) / 1e9,
    )
