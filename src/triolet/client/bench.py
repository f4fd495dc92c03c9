"""Runs a load against a server: the Trio half of a load test.

Every request leaves one result, however it ends; one that is cut off by a cancelled scope
leaves it in the same moment, so that a run that was stopped can be reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import attrs
import trio

from triolet.client.client import Client
from triolet.client.errors import (
    BrokenStreamError,
    RefusedError,
    StreamCutError,
    StreamFailedError,
    UnreachableError,
)
from triolet.client.figures import CANCELLED, COMPLETED, UNMARKED, RequestResult
from triolet.client.load import Load, Scale, arrivals, fit, prompts, sentence
from triolet.client.stream import TextStream

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from triolet.client.classify import StreamEvent
    from triolet.errors import TrioletError

Endpoint = Literal["chat", "completions"]

#: Words of the two prompts that measure how words become tokens: far enough apart that the
#: difference is not chance, and fit for a small context.
CALIBRATION_WORDS = (8, 72)
#: What some servers say for a finish reason when they gave up on a request.
ABORTS = frozenset({"abort", "error"})


@attrs.frozen
class Target:
    """How to ask a server."""

    client: Client
    model: str
    endpoint: Endpoint = "chat"
    #: Further fields of every request.
    fields: Mapping[str, object] = attrs.field(factory=dict)
    #: Seconds that one request may take; ``None`` is no limit.
    timeout_s: float | None = None

    def open(self, prompt: str, output_len: int) -> AbstractAsyncContextManager[TextStream]:
        """One request."""
        fields = {"max_tokens": output_len, **self.fields}
        path = "/chat/completions" if self.endpoint == "chat" else "/completions"
        said: dict[str, object] = (
            {"messages": [{"role": "user", "content": prompt}]}
            if self.endpoint == "chat"
            else {"prompt": prompt}
        )
        body = {
            "model": self.model,
            **said,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        return self.client.stream(path, body)


@attrs.define(eq=False)
class Run:
    """A load on its way; :attr:`results` is complete at any moment, also after a cancel."""

    target: Target
    load: Load
    #: One for each request of the load.
    texts: Sequence[str] = attrs.field(repr=False)
    #: Told of each result as it comes.
    on_result: Callable[[RequestResult], None] | None = None
    results: list[RequestResult] = attrs.field(factory=list, init=False, repr=False)
    _origin_s: float = attrs.field(default=0.0, init=False)

    async def run(self) -> None:
        """Send all requests and wait for their ends."""
        self._origin_s = trio.current_time()
        if self.load.rate is None:
            await self._closed()
        else:
            await self._open()

    async def _closed(self) -> None:
        numbers = iter(range(self.load.requests))
        async with trio.open_nursery() as nursery:
            for _ in range(min(self.load.concurrency or 1, self.load.requests)):
                nursery.start_soon(self._work, numbers)

    async def _work(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._ask(number, self._now())
        await trio.lowlevel.checkpoint()

    async def _open(self) -> None:
        slots = None if self.load.concurrency is None else trio.Semaphore(self.load.concurrency)
        async with trio.open_nursery() as nursery:
            for number, offset_s in enumerate(arrivals(self.load)):
                await trio.sleep_until(self._origin_s + offset_s)
                nursery.start_soon(self._ask_in_turn, slots, number, offset_s)

    async def _ask_in_turn(
        self, slots: trio.Semaphore | None, number: int, intended_s: float
    ) -> None:
        if slots is None:
            await self._ask(number, intended_s)
            return
        async with slots:
            await self._ask(number, intended_s)

    async def _ask(self, number: int, intended_s: float) -> None:  # noqa: ASYNC910 - it connects
        sighting = Sighting(number, self._origin_s, intended_s, self._now())
        patience_s = float("inf") if self.target.timeout_s is None else self.target.timeout_s
        try:
            with trio.move_on_after(patience_s) as patience:
                async with self.target.open(self.texts[number], self.load.output_len) as stream:
                    sighting.stream = stream
                    async for event in stream:
                        sighting.see(event)
                    sighting.end = _end(stream, None)
            if patience.cancelled_caught and sighting.end == CANCELLED:
                sighting.end = "timeout"
        except (BrokenStreamError, RefusedError, UnreachableError) as error:
            sighting.end, sighting.detail = _end(sighting.stream, error), error.message
        finally:
            result = sighting.result(self._now())
            self.results.append(result)
            if self.on_result is not None:
                self.on_result(result)

    def _now(self) -> float:
        return trio.current_time() - self._origin_s


@attrs.define(eq=False)
class Sighting:
    """What is seen of one request while it runs."""

    number: int
    origin_s: float
    intended_s: float
    sent_s: float
    stream: TextStream | None = None
    end: str = CANCELLED
    detail: str = ""
    arrivals_s: list[float] = attrs.field(factory=list)
    writes: int = 0
    _last_read: int = 0

    def see(self, event: StreamEvent) -> None:
        """Take note of an event."""
        if event.visible:
            self.arrivals_s.append(event.at.trio_s - self.origin_s)
            self.writes += event.read != self._last_read
            self._last_read = event.read

    def result(self, now_s: float) -> RequestResult:
        """What was seen, ``now_s`` seconds after the run began."""
        stream = self.stream
        usage = None if stream is None else stream.usage
        ended = None if stream is None else stream.ended
        return RequestResult(
            number=self.number,
            intended_s=self.intended_s,
            sent_s=self.sent_s,
            ended_s=now_s if ended is None else ended.trio_s - self.origin_s,
            end=self.end,
            arrivals_s=tuple(self.arrivals_s),
            writes=self.writes,
            bytes_read=0 if stream is None else stream.bytes_read,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            cached_tokens=None if usage is None else usage.cached_tokens,
            output_tokens=None if usage is None else usage.completion_tokens,
            finish_reason=None if stream is None else stream.finish_reasons.get(0),
            request_id=None if stream is None else stream.request_id,
            detail=self.detail,
        )


async def calibrate(target: Target, load: Load) -> Scale:
    """Ask for two prompts and one token each: how many tokens do how many words make here?

    Raises:
        TrioletError: The server did not answer, or not well.
    """
    # An answer of one token cannot have as many as a field may ask for.
    fields = {name: value for name, value in target.fields.items() if name != "min_tokens"}
    quiet = attrs.evolve(target, fields=fields)
    measured: list[tuple[int, int]] = []
    for words in CALIBRATION_WORDS:
        prompt = " ".join(sentence(load.seed, "calibration", words))
        async with quiet.open(prompt, 1) as stream:
            await _read_out(stream)
        usage = stream.usage
        if usage is None or usage.prompt_tokens is None:
            return Scale()
        measured.append((words, usage.prompt_tokens))
    return fit(*measured)  # noqa: ASYNC910 - two prompts were asked


async def prepare(
    target: Target,
    load: Load,
    *,
    scale: Scale | None = None,
    warmup: int = 0,
    on_result: Callable[[RequestResult], None] | None = None,
) -> Run:
    """Make a run that can start: prompts of the right length, and a server that is warm.

    Args:
        target: Whom to ask.
        load: What to ask for.
        scale: How many tokens words make; measured where ``None``.
        warmup: Requests of the same kind to send before; what comes of them is thrown away.
        on_result: Told of each result of the run as it comes.

    Raises:
        TrioletError: The server did not answer, or not well, when the prompts were measured.
    """
    if scale is None:
        scale = await calibrate(target, load)
    warm, texts = prompts(load, scale, warmup=warmup)
    if warm:
        at_once = min(warmup, load.concurrency or warmup)
        before = attrs.evolve(load, requests=warmup, rate=None, concurrency=at_once)
        await Run(target, before, warm).run()
    return Run(target, load, texts, on_result)  # noqa: ASYNC910 - nothing was asked of it


async def _read_out(stream: TextStream) -> None:  # noqa: ASYNC910 - it was read
    try:
        await stream.text()
    except StreamCutError:
        if stream.outcome is None or not stream.outcome.finished:
            raise


def _end(stream: TextStream | None, error: TrioletError | None) -> str:
    """The class of a request's end, from its stream and what was raised."""
    match error:
        case RefusedError():
            return f"refused:{error.status}:{error.code}"
        case UnreachableError():
            return "unreachable"
        case StreamFailedError():
            return f"error:{error.code}"
    finished = stream is not None and stream.outcome is not None and stream.outcome.finished
    if stream is None or not finished:
        return "truncated"
    reason = next((r for r in stream.finish_reasons.values() if r in ABORTS), None)
    if reason is not None:
        return f"finish:{reason}"
    return COMPLETED if error is None else UNMARKED
