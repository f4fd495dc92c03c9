"""The numbers at ``/metrics``, in Prometheus' text format.

Request counters are fed by final records; what the engine holds is read at scrape time from
its newest snapshot, so that a scrape shows one consistent moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from triolet.core import EngineStatistics

# A second series for every counter that says no more than the process's start time.
disable_created_metrics()  # type: ignore[no-untyped-call] # theirs has no types

#: From a cached prompt on a fast GPU to a long queue on a small CPU.
SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


@attrs.frozen
class ServerState:
    """What a scrape sees of the server: its engine and its live requests."""

    engine: EngineStatistics
    live_requests: int
    ready: bool
    #: Prompts that the engine has not begun with, and their tokens.
    queued_requests: int = 0
    queued_tokens: int = 0
    #: Requests whose reader lags.
    paused_requests: int = 0


@attrs.define(eq=False)
class Metrics:
    """One server's metrics, in a registry of their own."""

    #: Asked for the state at each scrape.
    state: Callable[[], ServerState]
    registry: CollectorRegistry = attrs.field(factory=CollectorRegistry, init=False)
    _requests: Counter = attrs.field(init=False)
    _prompt_tokens: Counter = attrs.field(init=False)
    _output_tokens: Counter = attrs.field(init=False)
    _duration: Histogram = attrs.field(init=False)
    _first_token: Histogram = attrs.field(init=False)
    _queue: Histogram = attrs.field(init=False)
    _late_cancels: Counter = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        registry = self.registry
        self._requests = Counter(
            "triolet_requests",
            "Requests that have ended, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "triolet_prompt_tokens", "Prompt tokens of ended requests.", registry=registry
        )
        self._output_tokens = Counter(
            "triolet_output_tokens",
            "Output tokens of ended requests, cancelled and failed ones too.",
            registry=registry,
        )
        self._duration = Histogram(
            "triolet_request_duration_seconds",
            "From arrival to the end of a request, by outcome.",
            ["outcome"],
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self._first_token = Histogram(
            "triolet_engine_time_to_first_token_seconds",
            "From admission to the first sampled token.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self._queue = Histogram(
            "triolet_request_queue_seconds",
            "From admission to the first step of the engine, or to the end of a request without.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self._late_cancels = Counter(
            "triolet_late_cancels",
            "Calls of the cancel route for requests that had ended or were ending: no-ops.",
            registry=registry,
        )
        registry.register(_StateCollector(self.state))

    def rejected(self) -> None:
        """Count a request, to whatever route, that was refused and has no record."""
        self._requests.labels("rejected").inc()

    def cancelled_late(self) -> None:
        """Count a cancel that came after the end."""
        self._late_cancels.inc()

    def ended(
        self,
        *,
        outcome: str,
        prompt_tokens: int,
        output_tokens: int,
        duration_s: float,
        first_token_s: float | None,
        queue_s: float | None,
    ) -> None:
        """Count a request's end. Seconds are ``None`` where it did not get so far."""
        self._requests.labels(outcome).inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._output_tokens.inc(output_tokens)
        self._duration.labels(outcome).observe(duration_s)
        if first_token_s is not None:
            self._first_token.observe(first_token_s)
        if queue_s is not None:
            self._queue.observe(queue_s)

    def render(self) -> bytes:
        """All metrics as Prometheus text."""
        return generate_latest(self.registry)


# A text completion with several prompts is a request for each to the engine, and counts so.
_REQUEST_GAUGES = {
    "live_requests": (
        "triolet_requests_live",
        "Requests that have not ended, each prompt counted.",
    ),
    "queued_requests": (
        "triolet_requests_queued",
        "Of these, the ones that the engine has not begun with.",
    ),
    "queued_tokens": ("triolet_queued_prompt_tokens", "Prompt tokens of these."),
    "paused_requests": ("triolet_requests_paused", "Requests paused because their client lags."),
}
_GAUGES = {
    "waiting": (
        "triolet_engine_sequences_waiting",
        "Sequences, one per choice, that wait for a row.",
    ),
    "running": ("triolet_engine_sequences_running", "Sequences that the engine computes."),
    "paused": ("triolet_engine_sequences_paused", "Sequences paused because their client lags."),
    "used_blocks": ("triolet_engine_kv_blocks_used", "KV cache blocks in use."),
    "total_blocks": ("triolet_engine_kv_blocks", "KV cache blocks there are."),
    "cached_blocks": (
        "triolet_engine_kv_blocks_cached",
        "KV cache blocks not in use that hold what a later prompt may reuse.",
    ),
    "used_rows": ("triolet_engine_batch_rows_used", "Rows of the batch in use."),
    "total_rows": ("triolet_engine_batch_rows", "Rows the batch has."),
}
_COUNTERS = {
    "steps": ("triolet_engine_steps", "Engine steps."),
    "preemptions": ("triolet_engine_preemptions", "Sequences set back for want of KV blocks."),
    "late_aborts": ("triolet_engine_late_aborts", "Aborts of requests no longer held: no-ops."),
    "prompt_tokens": ("triolet_engine_prompt_tokens", "Prompt tokens of scheduled requests."),
    "output_tokens": ("triolet_engine_output_tokens", "Tokens sampled."),
    "prefix_queried_tokens": (
        "triolet_engine_prefix_cache_queried_tokens",
        "Prompt tokens of requests that looked for a computed beginning.",
    ),
    "prefix_hit_tokens": (
        "triolet_engine_prefix_cache_hit_tokens",
        "Of these, the ones that needed no computing.",
    ),
}


@attrs.define(eq=False)
class _StateCollector(Collector):
    state: Callable[[], ServerState]

    def collect(self) -> Iterator[Metric]:
        state = self.state()
        yield GaugeMetricFamily(
            "triolet_ready", "1 while requests are taken, else 0.", value=float(state.ready)
        )
        for field, (name, text) in _REQUEST_GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(state, field))
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(state.engine, field))
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(state.engine, field))
