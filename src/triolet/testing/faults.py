"""What can go wrong in an engine, as data: each fault is a frozen value that says what and when.

Give some to a :class:`~triolet.testing.engine.ScriptedBackend`, in any number and mixture::

    ScriptedBackend(say("hello"), faults=[SlowStep(3, 2.0), FailedStep(5), Crash(9)])

They act on the real scheduler and the real engine loop, at the places where a model and its
machine would: the forward pass, the pool of KV blocks, the time that a step takes.

Steps are counted from 1, each time that the engine is asked for one; so a step in which it finds
nothing to compute counts too. Requests are counted from 1 in the order in which they were
submitted (each prompt of a request is one), and tokens of a choice from 0.

``ENGINE_FAULTS`` names all of them. None says anything about clients or sockets: for those see
:mod:`triolet.testing.streams` and :mod:`triolet.testing.schedule`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from triolet.engine.plan import NOTHING_LEFT

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Far outside every vocabulary, and a number that arrays of 64-bit integers still hold.
IMPOSSIBLE_ID = 2**31


@attrs.frozen
class SlowStep:
    """A step takes so many seconds more: a large prefill, a page fault, a busy machine."""

    step: int
    seconds: float


@attrs.frozen
class FailedStep:
    """The forward pass of a step raises. Its requests fail, and the engine lives on.

    Several in a row end the engine, as they do in reality: see
    :data:`triolet.engine.loop.MAX_CONSECUTIVE_FAILURES`.
    """

    step: int


@attrs.frozen
class Crash:
    """The engine dies in a step: nothing comes of it, and ``run()`` raises."""

    step: int


@attrs.frozen
class NeverReturns:
    """A step hangs in native code.

    Nobody can end it, so ``run()`` raises when the engine's stall timeout has passed.
    """

    step: int


@attrs.frozen
class LateOutput:
    """Right after the n-th abort the engine says one more token of the aborted request.

    A real engine does so when the abort comes during a step. Aborts are counted from 1, those
    of unknown requests left out.
    """

    abort: int


@attrs.frozen
class OutOfBlocks:
    """From a step on, for so many steps, no more than ``free`` of the free KV blocks can be had.

    Sequences wait and preempt each other, as on a machine whose memory somebody else took.
    """

    step: int
    steps: int = 1
    free: int = 0


@attrs.frozen
class FailedRequest:
    """One request fails alone, where it would sample token ``index``.

    As a model does whose logits are not finite, or whose request forbids every token.
    """

    request: int
    index: int = 0


@attrs.frozen
class WrongId:
    """Token ``index`` of one request is an id outside the vocabulary.

    A backend that knows its ``vocab_size`` finds that itself; else the text machine has to.
    """

    request: int
    index: int = 0
    token_id: int = IMPOSSIBLE_ID


EngineFault = (
    SlowStep
    | FailedStep
    | Crash
    | NeverReturns
    | LateOutput
    | OutOfBlocks
    | FailedRequest
    | WrongId
)
#: All kinds of engine fault.
ENGINE_FAULTS: tuple[type[EngineFault], ...] = (
    SlowStep,
    FailedStep,
    Crash,
    NeverReturns,
    LateOutput,
    OutOfBlocks,
    FailedRequest,
    WrongId,
)


class ScriptedFailureError(RuntimeError):
    """What a forward pass raises on cue."""


@attrs.frozen
class FaultTable:
    """Faults, by what asks for them. Faults of one kind and place add up or repeat each other."""

    faults: Sequence[EngineFault] = ()

    def extra_s(self, step: int) -> float:
        """Seconds that a step takes beyond the usual: infinite if it never returns."""
        seconds = 0.0
        for fault in self.faults:
            match fault:
                case SlowStep(step=at, seconds=more) if at == step:
                    seconds += more
                case NeverReturns(step=at) if at == step:
                    seconds = math.inf
        return seconds

    def crashes(self, step: int) -> bool:
        """Whether the engine dies in a step."""
        return Crash(step) in self.faults

    def fails(self, step: int) -> bool:
        """Whether the forward pass of a step raises."""
        return FailedStep(step) in self.faults

    def is_late(self, abort: int) -> bool:
        """Whether something is still said of the request of this abort."""
        return LateOutput(abort) in self.faults

    def free_blocks(self, step: int) -> int | None:
        """How many free blocks a step may have; ``None`` where nothing holds it back."""
        limits = [
            fault.free
            for fault in self.faults
            if isinstance(fault, OutOfBlocks) and fault.step <= step < fault.step + fault.steps
        ]
        return min(limits, default=None)

    def tokens(self, request: int) -> dict[int, int]:
        """By index, the ids that stand in for a request's own."""
        return dict(self._tokens(request))

    def _tokens(self, request: int) -> Iterator[tuple[int, int]]:
        for fault in self.faults:
            match fault:
                case FailedRequest(request=at, index=index) if at == request:
                    yield index, NOTHING_LEFT
                case WrongId(request=at, index=index, token_id=token_id) if at == request:
                    yield index, token_id
