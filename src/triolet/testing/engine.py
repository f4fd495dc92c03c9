"""The scripted backend: the real scheduler and the real engine loop, with tokens on cue.

Only the forward pass is replaced, so rows, blocks, pauses, preemptions and aborts behave as
they do with a model. It runs inside Trio and sleeps on Trio's clock, so a test on an autojump
clock plays minutes of generation in milliseconds. Needs no torch.

What goes wrong in it is data too: see :mod:`triolet.testing.faults`.

Log-probabilities are made up by a rule that a test can apply itself: see :func:`score`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import trio

from triolet.core import (
    EngineStatistics,
    ModelInfo,
    RequestId,
    StepResult,
    TokenLogprobs,
    TokenOutput,
)
from triolet.engine.blocks import BlockPool
from triolet.engine.loop import Engine
from triolet.engine.plan import Sample, StepSamples
from triolet.engine.prefix import PrefixIndex
from triolet.engine.scheduler import Scheduler
from triolet.errors import EngineDownError
from triolet.prompt.bytelevel import BYTE_BOS_ID, BYTE_EOS_ID, ByteTokenizer
from triolet.runtime.lifecycle import Served
from triolet.testing.faults import EngineFault, FaultTable, ScriptedFailureError

if TYPE_CHECKING:
    from triolet.core import EngineRequest
    from triolet.engine.plan import Chunk, StepPlan

#: What the scripted engine says where nobody wrote it a script.
DEFAULT_REPLY = (
    "This is the scripted engine. It runs no model, yet every byte takes the real way: "
    "scheduler, output, stream, socket. 🎭 "
)

_USER, _END = (
    ByteTokenizer().encode(marker, add_special_tokens=False)[0]
    for marker in ("<|user|>", "<|end|>")
)

#: The ids that :func:`score` ranks.
SCORED_IDS = len(ByteTokenizer().vocabulary)
# Any pair that puts neighbours in id and in index far apart. The first must have an inverse
# modulo SCORED_IDS.
_ID_STRIDE, _INDEX_STRIDE = 7, 13

#: What a script's model says instead of an id that ``min_tokens`` forbids: the first of these
#: that does not end the request either.
FILLER_IDS = range(ord("~"), 0, -1)


def score(token_id: int, index: int, top: int) -> TokenLogprobs:
    """The made-up log-probabilities of a token, at output index (or prompt position) ``index``.

    The id of rank r has the probability 2 ** -r, and ranks are a shuffle of all ids that depends
    on ``index``: so they are distinct, add up to 1 (but for 2 ** -SCORED_IDS) and agree with each
    other.
    """
    shift = index * _INDEX_STRIDE
    inverse = pow(_ID_STRIDE, -1, SCORED_IDS)
    rank = (token_id * _ID_STRIDE + shift) % SCORED_IDS + 1
    best = ((place - shift) * inverse % SCORED_IDS for place in range(min(top, SCORED_IDS)))
    return TokenLogprobs(
        token_id,
        -rank * math.log(2),
        rank,
        tuple((id_, -place * math.log(2)) for place, id_ in enumerate(best, 1)),
    )


@attrs.frozen
class Script:
    """What one choice's model says: these ids in order, then ``then_id`` for ever."""

    token_ids: tuple[int, ...]
    then_id: int
    #: The engine step in which this token would be sampled fails.
    fail_at: int | None = None

    def token(self, index: int) -> int:
        """The id of output token ``index``.

        Raises:
            ScriptedFailureError: The script says that the step fails here.
        """
        if index == self.fail_at:
            raise ScriptedFailureError("scripted failure of a step")
        return self.token_ids[index] if index < len(self.token_ids) else self.then_id


#: One script for all choices of a request, or one for each: choice i gets the i-th, over again
#: where there are fewer.
Scripts = Callable[["EngineRequest"], Script | tuple[Script, ...]]


def say(text: str = DEFAULT_REPLY, *, times: int = 1) -> Scripts:
    """A script that says ``text``, then ends the sequence, whatever the prompt."""
    ids = tuple(ByteTokenizer().encode(text, add_special_tokens=False)) * times
    return lambda _: Script(token_ids=ids, then_id=BYTE_EOS_ID)


def say_each(*texts: str) -> Scripts:
    """A script that says a text of its own for each choice, then ends it, whatever the prompt."""
    encode = ByteTokenizer().encode
    scripts = tuple(
        Script(token_ids=tuple(encode(text, add_special_tokens=False)), then_id=BYTE_EOS_ID)
        for text in texts
    )
    return lambda _: scripts


def echo(request: EngineRequest) -> Script:
    """A script that says the last user message back, or the whole prompt where there is none."""
    ids = request.prompt_ids
    if _USER in ids:
        start = len(ids) - ids[::-1].index(_USER)
        ids = ids[start : ids.index(_END, start) if _END in ids[start:] else None]
    return Script(token_ids=tuple(id_ for id_ in ids if id_ < BYTE_BOS_ID), then_id=BYTE_EOS_ID)


@attrs.define(eq=False)
class Cast:
    """The scripts of one request, which of its choices still play, and what goes wrong in it."""

    scripts: tuple[Script, ...]
    playing: set[int]
    #: By output index, ids that stand in for the script's.
    faulty: dict[int, int]


@attrs.define(eq=False)
class ScriptedRunner:
    """The forward pass of a script."""

    _scripts: Scripts
    _faults: FaultTable = attrs.field(factory=FaultTable)
    #: Whether the next step fails; the backend counts them.
    fails: bool = attrs.field(default=False, init=False)
    _live: dict[RequestId, Cast] = attrs.field(factory=dict, init=False)
    _added: int = attrs.field(default=0, init=False)

    def add(self, request: EngineRequest) -> None:
        """Cast the scripts of a request."""
        self._added += 1
        scripts = self._scripts(request)
        scripts = (scripts,) if isinstance(scripts, Script) else scripts
        self._live[request.id] = Cast(
            scripts, set(range(request.n)), self._faults.tokens(self._added)
        )

    def finish(self, request_id: RequestId, choice: int) -> None:
        """Take note that one choice of a request has ended; with the last one it is forgotten."""
        cast = self._live.get(request_id)
        if cast is not None:
            cast.playing.discard(choice)
            if not cast.playing:
                self.drop(request_id)

    def knows(self, request_id: RequestId) -> bool:
        """Whether a choice of this request still plays."""
        return request_id in self._live

    def drop(self, request_id: RequestId) -> None:
        """Forget a request."""
        self._live.pop(request_id, None)

    def run(self, plan: StepPlan) -> StepSamples:
        """See :meth:`triolet.engine.loop.Runner.run`."""
        if self.fails:
            raise ScriptedFailureError("scripted failure of a step")
        return StepSamples(
            tuple(self._sample(chunk) for chunk in plan.chunks if chunk.samples),
            {
                i: _prompt_scores(chunk)
                for i, chunk in enumerate(plan.chunks)
                if chunk.scores_prompt
            },
        )

    def _sample(self, chunk: Chunk) -> Sample:
        cast, sampling = self._live[chunk.request_id], chunk.sampling
        script = cast.scripts[chunk.choice % len(cast.scripts)]
        token = script.token(chunk.output_index)
        ends = sampling.stop_token_ids | {BYTE_EOS_ID}
        if chunk.output_index + 1 < sampling.min_tokens and token in ends:
            token = next(id_ for id_ in FILLER_IDS if id_ not in ends)
        token = cast.faulty.get(chunk.output_index, token)
        if sampling.logprobs is None:
            return Sample(token)
        return Sample(token, score(token, chunk.output_index, sampling.logprobs))

    def reset(self) -> None:
        """A script has no state to rebuild."""


def _prompt_scores(chunk: Chunk) -> tuple[TokenLogprobs, ...]:
    first = chunk.start + 1
    positions = range(first, first + chunk.scores)
    top = chunk.sampling.prompt_logprobs or 0
    return tuple(score(chunk.prompt_ids[position], position, top) for position in positions)


@attrs.define(eq=False)
class ScriptedBackend:
    """A :class:`~triolet.runtime.backend.Backend` whose tokens are written in advance."""

    scripts: Scripts = attrs.field(factory=say)
    #: Seconds of Trio time that each step takes.
    step_s: float = 0.0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    max_model_len: int = 4096
    block_size: int = 16
    total_blocks: int = 16_384
    #: ``priority`` heeds what requests say of theirs.
    scheduling_policy: str = "fcfs"
    #: Whether prompts that begin alike are computed once; scripts are as slow either way.
    prefix_caching: bool = True
    #: Sampled ids at or above it fail their request in the engine; with ``None`` they go on to
    #: the text machine, which has to find them.
    vocab_size: int | None = None
    #: Seconds that one step may take before :meth:`run` gives the engine up for dead.
    stall_timeout_s: float = math.inf
    #: What goes wrong, and when.
    faults: Sequence[EngineFault] = ()
    #: Raise from :meth:`run` after this many steps, as a dying engine does.
    die_after_steps: int | None = None
    _engine: Engine = attrs.field(init=False)
    _runner: ScriptedRunner = attrs.field(init=False)
    _pool: BlockPool = attrs.field(init=False)
    _table: FaultTable = attrs.field(init=False)
    _wake: trio.Event = attrs.field(factory=trio.Event, init=False)
    _running: bool = attrs.field(default=False, init=False)
    #: Times that the engine was asked for a step, and aborts of requests that it knew.
    _steps: int = attrs.field(default=0, init=False)
    _aborts: int = attrs.field(default=0, init=False)
    #: What is still said of aborted requests; at most one for each :class:`.faults.LateOutput`.
    _late: list[TokenOutput] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self._table = FaultTable(self.faults)
        self._runner = ScriptedRunner(self.scripts, self._table)
        self._pool = BlockPool(
            total_blocks=self.total_blocks,
            block_size=self.block_size,
            index=PrefixIndex(self.block_size) if self.prefix_caching else None,
        )
        self._engine = Engine(
            Scheduler(
                self._pool,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_model_len=self.max_model_len,
                eos_token_ids=frozenset({BYTE_EOS_ID}),
                heed_priority=self.scheduling_policy == "priority",
            ),
            self._runner,
            vocab_size=self.vocab_size,
        )

    async def run(
        self,
        steps: trio.MemorySendChannel[StepResult],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See :meth:`triolet.runtime.backend.Backend.run`."""
        self._running = True
        task_status.started()
        try:
            with steps:
                while True:
                    await self._step(steps)
        finally:
            self._running = False

    async def _step(self, steps: trio.MemorySendChannel[StepResult]) -> None:
        if not self._engine.has_work and not self._late:
            await self._wake.wait()
            self._wake = trio.Event()
            return
        self._steps += 1
        await self._compute()
        result = self._with_late(self._engine_step())
        if result is None:
            return
        for output in result.outputs:
            if output.finish is not None:
                self._runner.finish(output.request_id, output.choice)
        for failure in result.failures:
            self._runner.drop(failure.request_id)
        await steps.send(result)
        if self.die_after_steps is not None and result.step >= self.die_after_steps:
            raise EngineDownError("scripted death of the engine")

    async def _compute(self) -> None:
        """Let the time of a step pass."""
        needed_s = self.step_s + self._table.extra_s(self._steps)
        await trio.sleep(min(needed_s, self.stall_timeout_s))
        if needed_s > self.stall_timeout_s:
            raise EngineDownError(
                f"A step of the engine has taken more than {self.stall_timeout_s:g} s."
            )
        if self._table.crashes(self._steps):
            raise EngineDownError("scripted crash of the engine")

    def _engine_step(self) -> StepResult | None:
        self._runner.fails = self._table.fails(self._steps)
        limit = self._table.free_blocks(self._steps)
        taken: list[int] = []
        if limit is not None:
            taken = self._pool.allocate(max(0, self._pool.free_blocks - limit)) or []
        try:
            return self._engine.step()
        finally:
            self._pool.free(taken)

    def _with_late(self, result: StepResult | None) -> StepResult | None:
        if not self._late:
            return result
        late, self._late = tuple(self._late), []
        if result is None:
            return StepResult(self._engine.statistics().steps, late)
        return attrs.evolve(result, outputs=result.outputs + late)

    def submit(self, request: EngineRequest) -> None:
        """See :meth:`triolet.runtime.backend.Backend.submit`."""
        self._runner.add(request)
        self._engine.add(request)
        self._wake.set()

    def abort(self, request_id: RequestId) -> None:
        """See :meth:`triolet.runtime.backend.Backend.abort`."""
        if self._runner.knows(request_id):
            self._aborts += 1
            if self._table.is_late(self._aborts):
                self._late.append(TokenOutput(request_id, (FILLER_IDS[0],)))
                self._wake.set()
        self._engine.abort(request_id)
        self._runner.drop(request_id)

    def end_choice(self, request_id: RequestId, choice: int) -> None:
        """See :meth:`triolet.runtime.backend.Backend.end_choice`."""
        self._engine.end_choice(request_id, choice)
        self._runner.finish(request_id, choice)

    def pause(self, request_id: RequestId) -> None:
        """See :meth:`triolet.runtime.backend.Backend.pause`."""
        self._engine.pause(request_id)

    def resume(self, request_id: RequestId) -> None:
        """See :meth:`triolet.runtime.backend.Backend.resume`."""
        self._engine.resume(request_id)
        self._wake.set()

    def statistics(self) -> EngineStatistics:
        """See :meth:`triolet.runtime.backend.Backend.statistics`."""
        return self._engine.statistics()

    def healthy(self) -> bool:
        """See :meth:`triolet.runtime.backend.Backend.healthy`."""
        return self._running


def serve_script(
    backend: ScriptedBackend | None = None, *, names: tuple[str, ...] = ("scripted",)
) -> Served:
    """A loaded "model" on a scripted backend, ready for a :class:`~.lifecycle.Runtime`."""
    backend = backend or ScriptedBackend()
    tokenizer = ByteTokenizer()
    return Served(
        info=ModelInfo(
            names=names,
            max_model_len=backend.max_model_len,
            vocab_size=len(tokenizer.vocabulary),
            eos_token_ids=frozenset({BYTE_EOS_ID}),
            created=0,
            architecture="scripted",
        ),
        tokenizer=tokenizer,
        backend=backend,
    )
