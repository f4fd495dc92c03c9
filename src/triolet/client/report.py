"""Figures as a table for people and as an object for programs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from triolet.client.figures import Figures, RequestResult, Spread, figure
from triolet.client.load import Load

#: Of the JSON object; raised when a name in it changes its meaning.
FORMAT_VERSION = 1

_COLUMNS = ("p50", "p90", "p99", "max", "mean", "samples")
_WIDTH = 10


@attrs.frozen
class Report:
    """One run: what was asked, and what came of it."""

    url: str
    model: str
    endpoint: str
    load: Load
    results: Sequence[RequestResult] = attrs.field(repr=False)
    #: Share of one core that this process took.
    client_cpu: float
    #: Whether it was stopped before its end.
    stopped: bool = False

    def table(self) -> str:
        """What a person reads."""
        figures = figure(self.results)
        stopped = f", stopped after {figures.requests}" if self.stopped else ""
        lines = [
            f"{self.url}  {self.model}  {self.endpoint}",
            f"{self.load.requests} requests{stopped}, {self.load.describe()}",
            "",
            *_summary(figures, self.client_cpu),
            "",
            " " * 14 + "".join(f"{name:>{_WIDTH}}" for name in _COLUMNS),
            _row("TTFT ms", figures.ttft_s),
            _row("ITL ms", figures.itl_s),
            _row("TPOT ms", figures.tpot_s),
            _row("end to end ms", figures.end_to_end_s),
        ]
        return "\n".join([*lines, *_complaints(self.results)]) + "\n"

    def as_json(self) -> dict[str, object]:
        """What a program reads: settings, figures and every request. Times in seconds."""
        return {
            "format": FORMAT_VERSION,
            "url": self.url,
            "model": self.model,
            "endpoint": self.endpoint,
            "load": attrs.asdict(self.load),
            "stopped": self.stopped,
            "client_cpu": self.client_cpu,
            "figures": attrs.asdict(figure(self.results)),
            "requests": [
                {
                    **attrs.asdict(result),
                    "arrivals_s": list(result.arrivals_s),
                    "ttft_s": result.ttft_s,
                    "tpot_s": result.tpot_s,
                    "end_to_end_s": result.end_to_end_s,
                }
                for result in sorted(self.results, key=lambda result: result.number)
            ],
        }


def _summary(figures: Figures, client_cpu: float) -> list[str]:
    source = (
        "from usage"
        if not figures.counted_by_events
        else f"events counted as tokens in {figures.counted_by_events} of {figures.completed}: "
        "the server gave no usage"
    )
    silent = f"; {figures.silent} without a token" if figures.silent else ""
    lag = figures.send_lag_s
    late = f", sent {_ms(lag.p50)} ms late (p50), {_ms(lag.max)} ms (max)" if lag else ""
    throughput = (
        f"{figures.output_tokens_per_s:.1f} output tok/s, {figures.total_tokens_per_s:.1f} tok/s "
        f"in all, {figures.requests_per_s:.2f} requests/s, {figures.mean_concurrency:.1f} in flight"
    )
    tokens = (
        f"{figures.mean_prompt_tokens:.1f} in ({figures.mean_cached_tokens:.1f} cached), "
        f"{figures.mean_output_tokens:.1f} out per completed request; {source}"
    )
    writes = (
        f"{figures.tokens_per_event:.2f} tokens per event, {figures.tokens_per_write:.2f} per "
        f"write, {figures.bytes_per_write:.0f} bytes per write"
    )
    return [
        f"requests      {_ends(figures.ends)}{silent}; in {figures.duration_s:.2f} s",
        f"throughput    {throughput}",
        f"tokens        {tokens}",
        f"writes        {writes}",
        f"client        {client_cpu:.0%} of one core{late}",
    ]


def _ends(ends: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {end}" for end, count in ends.items()) or "none"


def _row(name: str, spread: Spread | None) -> str:
    if spread is None:
        return f"{name:<14}" + f"{'-':>{_WIDTH}}" * len(_COLUMNS)
    values = [_ms(getattr(spread, column)) for column in _COLUMNS[:-1]]
    return f"{name:<14}" + "".join(f"{v:>{_WIDTH}}" for v in [*values, str(spread.samples)])


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"


def _complaints(results: Sequence[RequestResult]) -> list[str]:
    """The first message of each class of failure."""
    first: dict[str, str] = {}
    for result in results:
        if result.detail and not result.completed:
            first.setdefault(result.end, result.detail)
    return ["", *(f"{end}: {detail}" for end, detail in first.items())] if first else []
