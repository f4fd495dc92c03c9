"""The rows of the table: what is asked of each server, through the client of ``triolet bench``."""

from __future__ import annotations

import statistics
import subprocess
from itertools import pairwise

import attrs
import trio
from memory import MemoryWatch

from contenders import Contender
from triolet.client.bench import Run, Target, prepare
from triolet.client.client import Client
from triolet.client.errors import BrokenStreamError, RefusedError, UnreachableError
from triolet.client.figures import RequestResult, figure
from triolet.client.load import Load, Scale, prompts, sentence

#: Loading and, for some, compiling a model on a busy machine.
START_TIMEOUT_S = 900.0
POLL_S = 0.05
#: Tokens of the stream that runs beside long prompts: more than it can say meanwhile.
BACKGROUND_TOKENS = 900
#: Of them, how many it says before the prompts come.
HEAD_START = 8
#: Requests with a warm prefix, after the cold one.
WARM_REQUESTS = 6


class ServerDiedError(Exception):
    """The process ended before it answered."""


@attrs.frozen
class Row:
    """One line of the table."""

    title: str
    #: Key of the value in a round's results.
    key: str
    unit: str
    higher_is_better: bool = False


ROWS = (
    Row("output, 1 stream", "tokens_per_s_1", "tok/s", higher_is_better=True),
    Row("output, 8 streams", "tokens_per_s_8", "tok/s", higher_is_better=True),
    Row("output, 32 streams", "tokens_per_s_32", "tok/s", higher_is_better=True),
    Row("TTFT p50, 1 stream", "ttft_ms_1", "ms"),
    Row("TTFT p50, 8 streams", "ttft_ms_8", "ms"),
    Row("TTFT p50, 32 streams", "ttft_ms_32", "ms"),
    Row("largest gap, 8 streams", "gap_ms_8", "ms"),
    Row("largest gap, 32 streams", "gap_ms_32", "ms"),
    Row("4 x 1000-token prompts: TTFT p50", "long_ttft_ms", "ms"),
    Row("the same: largest gap of a running stream", "long_gap_ms", "ms"),
    Row("822-token prompt, 800 shared: TTFT p50", "cached_ttft_ms", "ms"),
    Row("the same, the first time", "cold_ttft_ms", "ms"),
    Row("peak RSS of the process tree, 32 streams", "rss_mb", "MB"),
    Row("peak PSS of the process tree, 32 streams", "pss_mb", "MB"),
    Row("start to first token", "start_s", "s"),
)


@attrs.define(eq=False)
class Session:
    """One server that runs, and what was measured of it."""

    client: Client
    contender: Contender
    process: subprocess.Popen[bytes]
    scale: Scale
    #: Different in every round: no prompt is ever sent twice.
    seed: int
    measured: dict[str, float] = attrs.field(factory=dict)
    #: What was not as it should be, in words.
    remarks: list[str] = attrs.field(factory=list)

    def target(self, tokens: int) -> Target:
        """How to ask for exactly so many tokens."""
        return Target(self.client, self.contender.model, fields=self.contender.fields(tokens))

    async def wait_first_token(self, started_s: float) -> None:
        """Ask until a token comes; ``started_s`` is when the process was started.

        Raises:
            ServerDiedError: The process ended first.
        """
        text = " ".join(sentence(self.seed, "first", 8))
        with trio.fail_after(START_TIMEOUT_S):
            while not await self._says_something(text):
                if self.process.poll() is not None:
                    raise ServerDiedError(self.contender.name)
                await trio.sleep(POLL_S)
        self.measured["start_s"] = trio.current_time() - started_s

    async def _says_something(self, text: str) -> bool:
        try:
            async with self.target(2).open(text, 2) as stream:
                async for event in stream:
                    if event.visible:
                        return True
        except (UnreachableError, RefusedError, BrokenStreamError):
            return False
        return False

    async def streams(self, number: int) -> None:
        """So many streams at once, 64 tokens in and 128 out."""
        load = Load(
            requests=number,
            concurrency=number,
            input_len=64,
            output_len=128,
            seed=self.seed * 100 + number,
        )
        running = await prepare(self.target(load.output_len), load, scale=self.scale)
        watch = MemoryWatch(self.process.pid)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            await running.run()
            nursery.cancel_scope.cancel(reason="the row is done")
        self._check(f"{number} streams", running.results, load)
        figures = figure(running.results)
        self.measured[f"tokens_per_s_{number}"] = figures.output_tokens_per_s
        if figures.ttft_s and figures.itl_s:
            self.measured[f"ttft_ms_{number}"] = figures.ttft_s.p50 * 1000
            self.measured[f"gap_ms_{number}"] = figures.itl_s.max * 1000
        if number == 32:
            self.measured["rss_mb"], self.measured["pss_mb"] = watch.rss / 1e6, watch.pss / 1e6

    async def long_prompts(self) -> None:
        """Four prompts of 1000 tokens at once, beside a stream that has begun."""
        load = Load(requests=4, concurrency=4, input_len=1000, output_len=32, seed=self.seed)
        running = await prepare(self.target(load.output_len), load, scale=self.scale)
        begun = trio.Event()
        arrivals: list[float] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._background, begun, arrivals)
            await begun.wait()
            first_s = trio.current_time()
            await running.run()
            last_s = trio.current_time()
            nursery.cancel_scope.cancel(reason="the row is done")
        self._check("long prompts", running.results, load)
        if arrivals and arrivals[-1] < first_s:
            self.remarks.append("the running stream got nothing while the prompts were there")
        # A stream that is still silent at the end has a gap that has lasted until then.
        moments = [at for at in arrivals if at >= first_s]
        if len(arrivals) < BACKGROUND_TOKENS:
            moments.append(last_s)
        before = [at for at in arrivals if at < first_s][-1:] or [first_s]
        edges = [*before, *moments]
        gaps = [later - earlier for earlier, later in pairwise(edges)]
        self.measured["long_gap_ms"] = max(gaps, default=0.0) * 1000
        figures = figure(running.results)
        if figures.ttft_s:
            self.measured["long_ttft_ms"] = figures.ttft_s.p50 * 1000

    async def _background(self, begun: trio.Event, arrivals: list[float]) -> None:
        text = " ".join(sentence(self.seed, "background", self.scale.words(64)))
        try:
            async with self.target(BACKGROUND_TOKENS).open(text, BACKGROUND_TOKENS) as stream:
                async for event in stream:
                    if event.visible:
                        arrivals.append(event.at.trio_s)
                    if len(arrivals) >= HEAD_START:
                        begun.set()
        except BrokenStreamError as error:
            self.remarks.append(f"the running stream ended: {error.message}")
        begun.set()

    async def cached_prompts(self) -> None:
        """Prompts of 822 tokens that share 800, one after the other."""
        load = Load(
            requests=1 + WARM_REQUESTS,
            concurrency=1,
            input_len=822,
            shared_prefix=800,
            output_len=16,
            seed=self.seed,
        )
        _, texts = prompts(load, self.scale)
        running = Run(self.target(load.output_len), load, texts)
        await running.run()
        self._check("cached prompts", running.results, load)
        cold, *warm = [result.ttft_s for result in running.results]
        found = [ttft_s for ttft_s in warm if ttft_s is not None]
        if cold is not None and found:
            self.measured["cold_ttft_ms"] = cold * 1000
            self.measured["cached_ttft_ms"] = statistics.median(found) * 1000

    def _check(self, row: str, results: list[RequestResult], load: Load) -> None:
        """Remark on all that makes a figure incomparable."""
        figures = figure(results)
        if figures.completed < figures.requests:
            self.remarks.append(f"{row}: {figures.ends}")
        for result in results:
            if result.completed and result.tokens != load.output_len:
                self.remarks.append(f"{row}: {result.tokens} tokens for {load.output_len}")
                break
        given = figures.mean_prompt_tokens
        if given and abs(given - load.input_len) > 0.02 * load.input_len + 1:
            self.remarks.append(f"{row}: prompts of {given:.0f} tokens for {load.input_len}")
