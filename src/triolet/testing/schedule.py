"""What happens to a server, as data: who asks for what, how they behave, what else goes wrong.

A :class:`Schedule` is a stage (the server's settings) and a list of events with their times.
It can be drawn from a seed, printed, saved as JSON, cut down to what matters, and played again
exactly: :mod:`triolet.testing.storm` plays it in virtual time. ::

    schedule = Schedule.from_seed(7, size=200)
    Schedule.from_json(schedule.to_json()) == schedule
    shortest = shrink(schedule, lambda candidate: bool(play(candidate).broken))

Times are seconds from the start.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, TypeVar

import attrs
import cattrs
from cattrs.strategies import configure_tagged_union

from triolet.testing.faults import (
    Crash,
    EngineFault,
    FailedRequest,
    FailedStep,
    LateOutput,
    NeverReturns,
    OutOfBlocks,
    SlowStep,
    WrongId,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

#: Words that models and prompts of a storm are made of: of one, two and four bytes a character,
#: so that tokens, which are bytes here, cut characters.
WORDS = ("ab ", "né ", "🎭 ", "stop ", "the ", "x", "\n", "ß ")
#: What some ask to stop at: at once, within a character's reach, never.
STOPS = ("the ", "🎭", "p t", "zebra")
#: API keys of the stage's tenants. The last is not one of the server's.
KEYS = ("storm-key-one", "storm-key-two", "storm-key-wrong")

# Prompts of one request, in characters in all: below what is tokenized in a thread, which
# virtual time does not wait for.
_MAX_PROMPT_CHARACTERS = 1200


@attrs.frozen
class Stage:
    """The settings of the server; names and units as in :class:`triolet.config.Config`."""

    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    max_num_queued_reqs: int = 32
    max_num_queued_tokens: int = 262_144
    max_model_len: int = 2048
    block_size: int = 16
    total_blocks: int = 256
    scheduling_policy: str = "fcfs"
    #: Trio seconds of one engine step.
    step_s: float = 0.01
    max_stream_buffer: int = 8192
    max_stream_tokens: int = 512
    commit_after: float = 10.0
    keepalive: float = 15.0
    send_timeout: float = 30.0
    queue_timeout: float = 60.0
    request_timeout: float = 600.0
    drain_timeout: float = 25.0
    engine_stall_timeout: float = 60.0
    #: Whether clients need a key; they are tenants then.
    keyed: bool = False


@attrs.frozen
class Pause:
    """A client stops reading when it has so many bytes, for so long."""

    after_bytes: int
    seconds: float


@attrs.frozen
class Ask:
    """One request, and how its client behaves. A client reads to the end unless it says not."""

    #: Unique in the schedule; prompt and script are made from it.
    number: int
    at_s: float = 0.0
    chat: bool = True
    stream: bool = True
    #: Characters of each prompt, at least 8. A chat has one.
    prompts: tuple[int, ...] = (8,)
    n: int = 1
    max_tokens: int = 16
    #: Words that the model says before it ends by itself.
    words: int = 4
    stop: str | None = None
    logprobs: bool = False
    include_usage: bool = False
    priority: int | None = None
    #: Which of :data:`KEYS` it brings; heeded on a keyed stage only.
    key: int = 0
    timeout_s: float | None = None
    #: Whether all of the body is sent.
    uploads: bool = True
    pauses: tuple[Pause, ...] = ()
    #: Seconds that it takes for each message.
    read_s: float = 0.0
    leaves_after_s: float | None = None
    leaves_after_bytes: int | None = None
    #: When it asks the server to cancel it, counted from :attr:`at_s`.
    cancels_after_s: float | None = None


@attrs.frozen
class Drain:
    """Somebody tells the server to stop: the first time kindly, the second time not."""

    at_s: float


Event = Ask | Drain | EngineFault


@attrs.frozen
class Schedule:
    """All that happens in one play."""

    #: Decides in which order tasks run that could run at the same moment.
    seed: int
    stage: Stage = attrs.field(factory=Stage)
    events: tuple[Event, ...] = ()

    @classmethod
    def from_seed(cls, seed: int, size: int = 200) -> Schedule:
        """Draw a stage, so many requests, and what else happens. The same for the same numbers."""
        return _Draw(random.Random(seed), seed, size).schedule()  # noqa: S311 - it must repeat

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: It is not that.
        """
        try:
            return _CONVERTER.structure(json.loads(text), cls)
        except cattrs.BaseValidationError as error:
            raise ValueError("; ".join(cattrs.transform_error(error))) from error

    def to_json(self) -> str:
        """Write it, one line for each event."""
        data = _CONVERTER.unstructure(self)
        events = ",\n ".join(json.dumps(event, ensure_ascii=False) for event in data["events"])
        stage = json.dumps(data["stage"])
        return f'{{"seed": {self.seed}, "stage": {stage},\n"events": [\n {events}]}}\n'

    @property
    def asks(self) -> tuple[Ask, ...]:
        """Its requests."""
        return tuple(event for event in self.events if isinstance(event, Ask))

    @property
    def drains(self) -> tuple[Drain, ...]:
        """When the server is told to stop."""
        return tuple(event for event in self.events if isinstance(event, Drain))

    @property
    def faults(self) -> tuple[EngineFault, ...]:
        """What goes wrong in the engine."""
        return tuple(event for event in self.events if not isinstance(event, Ask | Drain))


_CONVERTER = cattrs.Converter(forbid_extra_keys=True)
configure_tagged_union(Event, _CONVERTER, tag_name="kind")


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool], *, plays: int = 200) -> Schedule:
    """The shortest list of events found that still fails.

    Leaves out halves, then smaller and smaller pieces: delta debugging, Zeller and Hildebrandt,
    IEEE TSE 2002.

    Args:
        schedule: One that fails.
        fails: Plays a candidate.
        plays: Candidates to try at most.
    """
    events = schedule.events
    pieces = 2
    while len(events) > 1 and plays > 0:
        size = -(-len(events) // pieces)
        for start in range(0, len(events), size):
            plays -= 1
            fewer = events[:start] + events[start + size :]
            if fewer and fails(attrs.evolve(schedule, events=fewer)):
                events = fewer
                pieces = max(pieces - 1, 2)
                break
            if plays <= 0:
                break
        else:
            if size == 1:
                break
            pieces = min(pieces * 2, len(events))
    return attrs.evolve(schedule, events=events)


@attrs.define(eq=False)
class _Draw:
    """Draws a schedule. Every choice is made by one generator, in a fixed order."""

    rng: random.Random
    seed: int
    size: int
    #: Seconds that things in this schedule take: a step, or what a step without time stands for.
    beat_s: float = attrs.field(default=2**-7, init=False)
    #: Whether all times are multiples of it, so that what clients do falls together with the
    #: ends of steps. Powers of two, for floating point to agree.
    on_the_beat: bool = attrs.field(default=False, init=False)

    def schedule(self) -> Schedule:
        """Draw it all."""
        stage = self._stage()
        asks = self._asks(stage)
        last_s = asks[-1].at_s
        return Schedule(
            self.seed, stage, (*asks, *self._faults(), *self._drains(last_s, stage.drain_timeout))
        )

    def _time(self, seconds: float) -> float:
        if self.on_the_beat:
            return round(seconds / self.beat_s) * self.beat_s
        return round(seconds, 6)

    def _often(self, share: float) -> bool:
        return self.rng.random() < share

    def _one(self, of: Sequence[T]) -> T:
        return self.rng.choice(of)

    def _stage(self) -> Stage:
        step_s = self._one((0.0, 2**-7, 2**-4, 1.0))
        self.beat_s = step_s or 2**-7
        self.on_the_beat = self._often(0.5)
        seqs = self._one((1, 2, 4, 8))
        block_size = self._one((4, 16))
        return Stage(
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + self._one((8, 64, 256)),
            max_num_queued_reqs=self._one((1, 16, 64)),
            max_num_queued_tokens=self._one((500, 4000, 262_144)),
            block_size=block_size,
            # One request of the greatest length always fits, four rarely do.
            total_blocks=2048 // block_size * self._one((1, 1, 2, 8)),
            scheduling_policy=self._one(("fcfs", "priority")),
            step_s=step_s,
            max_stream_buffer=self._one((700, 1500, 4096, 65_536)),
            max_stream_tokens=self._one((4, 32, 512)),
            commit_after=self._one((0.0, 10.0)) * self.beat_s * 10,
            keepalive=self._one((0.0, 15.0)) * self.beat_s * 10,
            send_timeout=300 * self.beat_s,
            queue_timeout=self._one((0.0, 30.0, 500.0)) * self.beat_s,
            request_timeout=self._one((100, 1000, 10_000)) * self.beat_s,
            drain_timeout=self._one((0, 20, 1000)) * self.beat_s,
            engine_stall_timeout=100 * self.beat_s,
            keyed=self._often(0.5),
        )

    def _asks(self, stage: Stage) -> list[Ask]:
        """Some that come one by one, and now and then a flood of them at the same moment."""
        gap_s = self.beat_s * self._one((2.0, 10.0, 40.0))
        now_s, flood = 0.0, 0
        asks = []
        for number in range(self.size):
            if flood == 0:
                now_s += self.rng.expovariate(1 / gap_s)
                flood = self.rng.randint(5, 40) if self._often(0.01) else 0
            else:
                flood -= 1
            asks.append(self._ask(number, self._time(now_s), stage))
        return asks

    def _ask(self, number: int, at_s: float, stage: Stage) -> Ask:
        beat_s = self.beat_s
        chat = self._often(0.5)
        prompts = [self._one((8, 20, 100, 400)) for _ in range(1 if chat else self._one((1, 1, 3)))]
        ask = Ask(
            number=number,
            at_s=at_s,
            chat=chat,
            stream=self._often(0.8),
            prompts=tuple(min(p, _MAX_PROMPT_CHARACTERS // len(prompts)) for p in prompts),
            n=self._one((1, 1, 1, 2, 4)),
            max_tokens=self._one((1, 4, 16, 40, 40)),
            words=self._one((0, 1, 4, 12, 12)),
            stop=self._one(STOPS) if self._often(0.4) else None,
            logprobs=self._often(0.1),
            include_usage=self._often(0.5),
            priority=self.rng.randint(-2, 2) if self._often(0.3) else None,
            # A wrong key now and then.
            key=self._one((0, 0, 0, 0, 0, 1, 1, 1, 2)),
            timeout_s=self._one((1.0, 20.0, 300.0)) * beat_s if self._often(0.1) else None,
            uploads=not self._often(0.03),
        )
        return self._behaviour(ask, stage)

    def _behaviour(self, ask: Ask, stage: Stage) -> Ask:
        """Half of all clients are well-behaved."""
        if not ask.uploads and self._often(0.7):
            return attrs.evolve(ask, leaves_after_s=self._moment())
        beat_s = self.beat_s
        match self.rng.randrange(12):
            case 0 | 1:
                return attrs.evolve(ask, leaves_after_s=self._moment())
            case 2:
                return attrs.evolve(ask, leaves_after_bytes=self.rng.randrange(1, 2000))
            case 3:
                return attrs.evolve(ask, cancels_after_s=self._moment())
            case 4:
                return attrs.evolve(ask, pauses=self._pauses(stage))
            case 5:
                ask = attrs.evolve(ask, read_s=self._one((1, 10)) * beat_s)
        return ask

    def _pauses(self, stage: Stage) -> tuple[Pause, ...]:
        """Two, of which the longer may be more than the server bears."""
        beat_s = self.beat_s
        short = Pause(self.rng.randrange(800), self._one((5, 50)) * beat_s)
        long_s = min(self._one((5, 50, 1000)) * beat_s, 2 * stage.send_timeout)
        long = Pause(self.rng.randrange(1500), long_s)
        return tuple(sorted((short, long), key=lambda pause: pause.after_bytes))

    def _moment(self) -> float:
        """A moment in the life of a request: at once, or after some steps."""
        if self._often(0.1):
            return 0.0
        return self._time(self.rng.expovariate(1 / (self._one((1, 10, 60)) * self.beat_s)))

    def _step(self) -> int:
        return self.rng.randrange(1, 10 * self.size + 2)

    def _faults(self) -> list[EngineFault]:
        beat_s = self.beat_s
        faults: list[EngineFault] = []
        for _ in range(self.size // 20):
            match self.rng.randrange(5):
                case 0:
                    faults.append(SlowStep(self._step(), self._one((5, 40)) * beat_s))
                case 1:
                    faults.append(FailedStep(self._step()))
                case 2:
                    faults.append(
                        OutOfBlocks(self._step(), self.rng.randint(1, 30), self._one((0, 2)))
                    )
                case 3:
                    faults.append(LateOutput(self.rng.randint(1, self.size // 3 + 1)))
                case 4:
                    request, index = self.rng.randint(1, self.size), self.rng.randrange(8)
                    wrong = self._often(0.5)
                    faults.append((WrongId if wrong else FailedRequest)(request, index))
        if self._often(0.2):
            # Late, for nothing much happens after it.
            step = self.rng.randrange(self.size, 4 * self.size + 2)
            faults.append(Crash(step) if self._often(0.5) else NeverReturns(step))
        return faults

    def _drains(self, last_s: float, drain_timeout_s: float) -> list[Drain]:
        if not self._often(0.4):
            return []
        first_s = self._time(last_s * self.rng.uniform(0.6, 1.0))
        drains = [Drain(first_s)]
        if self._often(0.5):
            drains.append(Drain(self._time(first_s + self.rng.random() * drain_timeout_s)))
        return drains
