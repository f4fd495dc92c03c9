"""Plays a schedule against the whole server, in virtual time, and says which rules it broke.

The app, the runtime, the scheduler and the engine loop are the real ones; the model is scripted
and clients are tasks that speak ASGI. One play of some hundred requests takes a second or two.
The same schedule gives the same play, to the last byte of :meth:`Play.transcript`.

From a shell, to look for bugs, and to look again at one that was found::

    python -m triolet.testing.storm --minutes 10
    python -m triolet.testing.storm --seed 7 --shrink
    python -m triolet.testing.storm --load found.json

The rules are those of :mod:`triolet.testing.settled`, and those of
:func:`triolet.testing.verdict.judge`, which compares what each client saw with what is on record.
"""

from __future__ import annotations

import logging
import random
import re
import sys
import time
from collections import Counter
from collections.abc import MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click
import trio
from starlette.types import ASGIApp
from trio.testing import MockClock, wait_all_tasks_blocked

from triolet.config import Config
from triolet.core import EngineStatistics, RequestId
from triolet.runtime.lifecycle import Phase
from triolet.server.deadline_stream import RECORD_KEY, ConnectionRecord
from triolet.testing.asgi import AsgiClient, open_server
from triolet.testing.checkpoints import seeded_scheduling
from triolet.testing.counting import CountingBackend
from triolet.testing.engine import ScriptedBackend, serve_script
from triolet.testing.lines import Lines
from triolet.testing.schedule import KEYS, Ask, Drain, Schedule, Stage, shrink
from triolet.testing.settled import Witness
from triolet.testing.verdict import Story, judge
from triolet.testing.visitor import NUMBER_HEADER, Seen, Visitor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import Receive, Scope, Send

    from triolet.core import CancelCause
    from triolet.runtime.record import RequestRecord
    from triolet.testing.asgi import AsgiServer

#: Virtual seconds after which whoever has not ended hangs: longer than any schedule takes.
PATIENCE_S = 1e6
#: Requests of a play where nobody says how many.
DEFAULT_SIZE = 200

_COUNT = re.compile(rb'^triolet_requests_total\{outcome="([^"]+)"\} ([0-9.]+)$', re.MULTILINE)

#: Ids, numbers, and what was seen.
_VARYING = re.compile(r"(chat)?cmpl-\w+|[0-9.]+|[{\['(].*")


@attrs.frozen
class Play:
    """What came of a schedule."""

    schedule: Schedule
    #: A sentence for each rule that was broken.
    broken: tuple[str, ...]
    #: What each request came to, by its number.
    stories: tuple[Story, ...]
    #: How many requests ended in each way.
    outcomes: Counter[str]
    #: How often the backend was told what.
    calls: Counter[str]
    statistics: EngineStatistics
    #: Virtual seconds that it took.
    took_s: float

    def transcript(self) -> str:
        """All that clients saw and records say, one line for each request."""
        return "".join(f"{story}\n" for story in self.stories)

    def report(self) -> str:
        """What was broken, and how to see it again."""
        seed, size = self.schedule.seed, len(self.schedule.asks)
        again = f"--seed {seed} --size {size} --shrink"
        if self.schedule != Schedule.from_seed(seed, size):
            again = "--load FILE, of the schedule as --save writes it"
        return "\n".join((
            f"seed {seed} broke {len(self.broken)} rules:",
            *self.broken[:20],
            f"again: python -m triolet.testing.storm {again}",
        ))


def play(schedule: Schedule) -> Play:
    """Play a schedule from start to end. Starts a Trio loop of its own."""
    with _quiet(), seeded_scheduling(schedule.seed):
        return trio.run(_Performance(schedule).run, clock=MockClock(autojump_threshold=0))


@contextmanager
def _quiet() -> Iterator[None]:
    """Log nothing: failures are on cue here, and a kept traceback keeps a request alive."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@attrs.define(eq=False)
class _Door:
    """The app, with a note of who went in."""

    app: ASGIApp
    states: dict[int, MutableMapping[str, object]] = attrs.field(factory=dict, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        number = dict(scope["headers"]).get(NUMBER_HEADER.encode())
        if number is not None and int(number) not in self.states:
            scope["state"][RECORD_KEY] = ConnectionRecord()
            self.states[int(number)] = scope["state"]
        await self.app(scope, receive, send)

    def request_id(self, number: int) -> str | None:
        """The server's id for a request, once it has one."""
        found = self.states.get(number, {}).get("request_id")
        return None if found is None else str(found)

    def hang_up(self, number: int, cause: CancelCause) -> None:
        """Say why the connection ends, as our own listener does before it closes one."""
        record = self.states[number][RECORD_KEY]
        assert isinstance(record, ConnectionRecord)  # noqa: S101 - set above
        record.ended_by = cause


@attrs.define(eq=False)
class _Performance:
    """One play under way."""

    schedule: Schedule
    seen: dict[int, Seen] = attrs.field(factory=dict, init=False)
    broken: list[str] = attrs.field(factory=list, init=False)

    async def run(self) -> Play:
        stage = self.schedule.stage
        scripted = _backend(self.schedule)
        backend = CountingBackend(scripted)
        served = attrs.evolve(serve_script(scripted), backend=backend)
        async with open_server(served, _config(stage)) as server:
            door = _Door(server.client.app)
            witness = Witness.of(server.runtime, backend)
            await self._all(server, door)
            await wait_all_tasks_blocked()
            took_s = trio.current_time()
            self.broken += witness.broken()
            if server.runtime.phase is not Phase.STOPPED:
                await self._compare_metrics(server, witness.records)
        if server.runtime.phase is not Phase.STOPPED:
            self.broken.append(f"the server is {server.runtime.phase} after its end")
        if backend.down != (server.runtime.failure is not None):
            self.broken.append(f"the failure of the server is {server.runtime.failure!r}")
        stories = self._stories(door, witness)
        self.broken += judge(self.schedule, stories)
        return Play(
            self.schedule,
            tuple(self.broken),
            stories,
            Counter(record.outcome for record in witness.records),
            backend.calls,
            backend.statistics(),
            took_s,
        )

    async def _all(self, server: AsgiServer, door: _Door) -> None:
        """Everyone comes, and leaves."""
        with trio.move_on_after(PATIENCE_S) as patience:
            async with trio.open_nursery() as nursery:
                client = AsgiClient(door, nursery)
                for ask in self.schedule.asks:
                    nursery.start_soon(self._visit, ask, client, door)
                for drain in self.schedule.drains:
                    nursery.start_soon(_drain, drain, server)
        if patience.cancelled_caught:
            waiting = [ask.number for ask in self.schedule.asks if ask.number not in self.seen]
            self.broken.append(f"something hangs; no end came for {waiting}")

    async def _visit(self, ask: Ask, client: AsgiClient, door: _Door) -> None:
        visitor = Visitor(
            ask,
            self.schedule.stage,
            client,
            lambda: door.request_id(ask.number),
            lambda cause: door.hang_up(ask.number, cause),
        )
        await trio.sleep_until(ask.at_s)
        self.seen[ask.number] = await visitor.visit()

    def _stories(self, door: _Door, witness: Witness) -> tuple[Story, ...]:
        records: dict[str, list[RequestRecord]] = {}
        for record in witness.records:
            records.setdefault(record.id, []).append(record)
        stuck = {
            request.id.partition(":")[0]
            for request in witness.backend.submitted
            if witness.backend.was_stuck(request.id)
        }
        stories = []
        for ask in self.schedule.asks:
            request_id = RequestId(door.request_id(ask.number) or "")
            if ask.number in self.seen:
                found = tuple(records.get(request_id, ()))
                recorded_s = witness.recorded_s.get(request_id)
                seen = self.seen[ask.number]
                stories.append(Story(ask, seen, found, recorded_s, request_id in stuck))
        return tuple(stories)

    async def _compare_metrics(self, server: AsgiServer, records: list[RequestRecord]) -> None:
        """The metrics have counted what is on record; who had no key is rejected there too."""
        response = await server.client.request("GET", "/metrics")
        counted = {name.decode(): float(count) for name, count in _COUNT.findall(response.body)}
        for outcome, count in Counter(record.outcome for record in records).items():
            found = counted.get(outcome, 0.0)
            if found != count and not (outcome == "rejected" and found > count):
                self.broken.append(f"the metrics counted {found:g} as {outcome}, of {count}")


async def _drain(drain: Drain, server: AsgiServer) -> None:
    await trio.sleep_until(drain.at_s)
    server.runtime.drain()


def _backend(schedule: Schedule) -> ScriptedBackend:
    stage = schedule.stage
    return ScriptedBackend(
        Lines.of(schedule.asks),
        step_s=stage.step_s,
        max_num_seqs=stage.max_num_seqs,
        max_num_batched_tokens=stage.max_num_batched_tokens,
        max_model_len=stage.max_model_len,
        block_size=stage.block_size,
        total_blocks=stage.total_blocks,
        scheduling_policy=stage.scheduling_policy,
        stall_timeout_s=stage.engine_stall_timeout,
        # A wrong id is found by the engine in half of all plays, else by the text machine.
        vocab_size=schedule.seed % 2 * 512 or None,
        faults=schedule.faults,
    )


def _config(stage: Stage) -> Config:
    settings = attrs.asdict(stage)
    for name in ("step_s", "keyed", "max_model_len", "block_size", "total_blocks"):
        del settings[name]
    return Config(**settings, api_key=KEYS[:-1] if stage.keyed else ())


def find(start: int, *, size: int = DEFAULT_SIZE, seconds: float) -> Play | None:
    """Play seed after seed for so many seconds of real time; the first play that broke a rule."""
    until_s = time.monotonic() + seconds
    seed = start
    while time.monotonic() < until_s:
        found = play(Schedule.from_seed(seed, size))
        if found.broken:
            return found
        seed += 1
    click.echo(f"{seed - start} seeds, from {start}: no rule was broken.")
    return None


def _shrunk(found: Play) -> Play:
    """The same failure with as few events as can be found."""
    wanted = _kinds(found)

    def fails_so(candidate: Schedule) -> bool:
        return bool(_kinds(play(candidate)) & wanted)

    return play(shrink(found.schedule, fails_so))


def _kinds(found: Play) -> set[str]:
    """The sentences without what differs from one failure of a kind to the next."""
    return {_VARYING.sub("", sentence) for sentence in found.broken[:1]}


@click.command()
@click.option("--minutes", type=float, help="Play seed after seed for so long.")
@click.option("--seed", type=int, help="Play this seed, or start with it; random if not given.")
@click.option("--size", default=DEFAULT_SIZE, show_default=True, help="Requests of one play.")
@click.option("--load", type=click.Path(exists=True, path_type=Path), help="Play a saved schedule.")
@click.option("--save", type=click.Path(path_type=Path), help="Save a schedule that fails here.")
@click.option("--shrink", "shrinks", is_flag=True, help="Leave out what does not matter to it.")
def main(
    *,
    minutes: float | None,
    seed: int | None,
    size: int,
    load: Path | None,
    save: Path | None,
    shrinks: bool,
) -> None:
    """Play storms against the server and report the first that breaks a rule."""
    seed = random.SystemRandom().randrange(10**9) if seed is None else seed
    found: Play | None
    if load is not None:
        found = play(Schedule.from_json(load.read_text(encoding="utf-8")))
    elif minutes is None:
        found = play(Schedule.from_seed(seed, size))
    else:
        click.echo(f"from seed {seed}, {minutes:g} minutes")
        found = find(seed, size=size, seconds=60 * minutes)
    if found is None:
        return
    if found.broken and shrinks:
        click.echo(found.report())
        found = _shrunk(found)
        click.echo(found.schedule.to_json())
    if found.broken and save is not None:
        save.write_text(found.schedule.to_json(), encoding="utf-8")
    click.echo(found.report() if found.broken else f"no rule was broken; {dict(found.outcomes)}")
    sys.exit(bool(found.broken))


if __name__ == "__main__":
    main()
