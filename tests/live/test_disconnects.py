"""The issue's proof: whenever and however clients leave, all that they held comes back."""

from __future__ import annotations

import os
import random
import time
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio
from tests.live.processes import PATIENCE_S, poll, post, reset_on_close

from triolet.config import Config
from triolet.runtime.bridge import EngineThread
from triolet.runtime.lifecycle import Runtime
from triolet.server.app import create_app
from triolet.server.listen import ListenOptions, serve
from triolet.testing.engine import ScriptedBackend, say, serve_script

pytestmark = [pytest.mark.live, pytest.mark.slow]

#: Visits of a model on two cores, and of a server whose tasks are looked at.
FEW = 200
#: Visits of a server whose memory is looked at. TRIOLET_CHURN=10000 makes both tests longer.
CHURN = int(os.environ.get("TRIOLET_CHURN", "1000"))
#: Enough to mix the fates of streams.
AT_A_TIME = 8
EVENT = b"data: {"
#: What the allocator may keep for itself, and what a visit may: less than any object of one.
RSS_SLACK_BYTES, RSS_PER_VISIT_BYTES = 4 * 2**20, 256


@attrs.frozen
class Visit:
    """What one client does: sends its request, reads so many chunks, and leaves."""

    body: dict[str, object]
    #: 0 leaves before the first token, ``None`` before its request is complete.
    chunks: int | None
    #: Leaves by RST, else by FIN.
    reset: bool
    path: str

    async def pay(self, address):
        sock = trio.socket.socket()
        await sock.connect(address)
        async with trio.SocketStream(sock) as stream:
            request = post(self.body, self.path)
            if self.chunks is None:
                await stream.send_all(request[: len(request) // 2])
                return
            await stream.send_all(request)
            received = b""
            while received.count(EVENT) < self.chunks and b"[DONE]" not in received:
                data = await stream.receive_some(4096)
                assert data, received
                received += data
            if self.reset:
                reset_on_close(sock)


def visits(model, count, *, most_chunks, max_tokens, seed=20_261_129):
    """Seeded visits: a third leave before the first token, an eighth before they have asked."""
    randomness = random.Random(seed)
    content = "Tell me a story."
    for number in range(count):
        chat = randomness.random() < 0.5
        prompt = (
            {"messages": [{"role": "user", "content": content}]} if chat else {"prompt": content}
        )
        yield Visit(
            {
                "model": model,
                "stream": randomness.random() < 0.8 or number % 3 != 0,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                **prompt,
            },
            chunks=(
                None
                if number % 8 == 7
                else 0
                if number % 3 == 0
                else randomness.randint(1, most_chunks)
            ),
            reset=randomness.random() < 0.5,
            path="/v1/chat/completions" if chat else "/v1/completions",
        )


async def pay_all(address, found, *, within):
    """Pay all visits, a few at a time."""
    queue = list(found)

    async def pay_some():
        await trio.lowlevel.checkpoint()
        while queue:
            await queue.pop().pay(address)

    with trio.fail_after(within):
        async with trio.open_nursery() as nursery:
            for _ in range(AT_A_TIME):
                nursery.start_soon(pay_some)


def resident_bytes(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def assert_all_is_back(server, model, count, *, most_chunks, max_tokens):
    """Send so many clients; afterwards the server holds what it held before the first."""
    # One before it counts, so that what is opened lazily and kept is open.
    body = {"model": model, "prompt": "x", "max_tokens": 1}
    assert server.ask("POST", "/v1/completions", body).status == 200
    before, start = server.numbers(), server.file_descriptors()
    found = list(visits(model, count, most_chunks=most_chunks, max_tokens=max_tokens))
    trio.run(lambda: pay_all(server.address, found, within=PATIENCE_S + count))
    server.wait_free()
    poll(lambda: server.file_descriptors() <= start, "return of all file descriptors")
    after = server.numbers()
    ended = {
        outcome: after.get(outcome, 0) - before.get(outcome, 0)
        for outcome in ("finished", "failed", "rejected", "cancelled:disconnect")
    }
    asked = sum(visit.chunks is not None for visit in found)
    assert ended["failed"] == ended["rejected"] == 0
    # A reset can overtake the request it follows: then the server never heard of that one. And
    # who leaves in the middle of a body has been heard.
    assert asked * 2 / 3 <= ended["finished"] + ended["cancelled:disconnect"] <= count
    assert ended["cancelled:disconnect"] > asked / 3
    assert server.ask("POST", "/v1/completions", body).status == 200


def test_a_thousand_clients_that_leave_leave_nothing_behind(start_scripted):
    """No block, no descriptor, no memory."""
    server = start_scripted("--scripted-text", "ab " * 400, "--scripted-step-ms", "1")
    # The first ones fill caches and the allocator's arenas.
    assert_all_is_back(server, "scripted", FEW, most_chunks=20, max_tokens=1000)
    start = resident_bytes(server.process.pid)
    assert_all_is_back(server, "scripted", CHURN, most_chunks=20, max_tokens=1000)
    grown = resident_bytes(server.process.pid) - start
    assert grown < RSS_SLACK_BYTES + CHURN * RSS_PER_VISIT_BYTES


@pytest.mark.model
def test_nor_do_they_on_the_real_model(model_server):
    assert_all_is_back(model_server.process, model_server.model, FEW, most_chunks=4, max_tokens=256)


@attrs.define(eq=False)
class SlowEngine:
    """A scripted engine in the engine's thread, whose steps take time; keeps each snapshot."""

    engine: object
    runner: object
    step_s: float
    snapshots: list = attrs.field(factory=list)

    @property
    def has_work(self):
        return self.engine.has_work

    def add(self, request):
        self.runner.add(request)
        self.engine.add(request)

    def abort(self, request_id):
        self.engine.abort(request_id)

    def pause(self, request_id):
        self.engine.pause(request_id)

    def resume(self, request_id):
        self.engine.resume(request_id)

    def step(self):
        time.sleep(self.step_s)  # a thread that computes, as a model does
        return self.engine.step()

    def statistics(self):
        self.snapshots.append(self.engine.statistics())
        return self.snapshots[-1]


@attrs.frozen(eq=False)
class Here:
    """A server in this process, on a real port."""

    runtime: Runtime
    engine: SlowEngine
    address: tuple[str, int]


@asynccontextmanager
async def open_here(*, step_s):
    script = ScriptedBackend(say("ab " * 1000))
    engine = SlowEngine(script._engine, script._runner, step_s)
    served = attrs.evolve(serve_script(script), backend=EngineThread(engine))

    async def load():
        await trio.lowlevel.checkpoint()
        return served

    runtime = Runtime(
        load,
        max_live_requests=64,
        max_undelivered_bytes=65_536,
        max_request_timeout_s=600,
        drain_timeout_s=0,
    )
    app = create_app(runtime, Config())
    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.run)
        listen = partial(serve, app, ListenOptions(port=0), shutdown_trigger=runtime.wait_stopped)
        (url,) = await nursery.start(listen)
        await runtime.wait_started()
        await settled(lambda: engine.snapshots, "first look at the engine")
        yield Here(runtime, engine, ("127.0.0.1", int(url.rpartition(":")[2])))
        runtime.drain()


async def settled(condition, what):
    """Wait until a condition holds that other tasks and threads bring about."""
    deadline = trio.current_time() + PATIENCE_S
    await trio.lowlevel.checkpoint()
    while not condition():
        if trio.current_time() > deadline:
            raise TimeoutError(f"no {what} within {PATIENCE_S} s")
        await trio.sleep(0.005)


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "fin"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_blocks_are_free_within_one_step_of_the_server_seeing_it(reset, stream):
    body = {"model": "scripted", "prompt": "x" * 100, "max_tokens": 1000, "stream": stream}
    async with open_here(step_s=0.05) as here:
        ended_at = []
        here.runtime.on_record = lambda record: ended_at.append((
            record.outcome,
            here.engine.snapshots[-1].steps,
        ))
        sock = trio.socket.socket()
        await sock.connect(here.address)
        async with trio.SocketStream(sock) as client:
            await client.send_all(post(body))
            await settled(lambda: here.engine.snapshots[-1].output_tokens >= 3, "token")
            assert here.engine.snapshots[-1].used_blocks > 0
            if reset:
                reset_on_close(sock)
        await settled(lambda: here.engine.snapshots[-1].used_blocks == 0, "free blocks")
        ((outcome, steps),) = ended_at
        assert outcome == "cancelled:disconnect"
        held = [i for i, one in enumerate(here.engine.snapshots) if one.used_blocks > 0]
        free = here.engine.snapshots[held[-1] + 1]
        # The step in flight when the server saw it, and no further one.
        assert free.steps <= steps + 1
        assert (free.used_rows, free.running, free.waiting) == (0, 0, 0)


async def test_tasks_and_handles_are_back_at_their_start_values():
    async with open_here(step_s=0.001) as here:
        start = trio.lowlevel.current_statistics().tasks_living
        count = CHURN if "TRIOLET_CHURN" in os.environ else FEW
        found = visits("scripted", count, most_chunks=20, max_tokens=1000)
        await pay_all(here.address, found, within=PATIENCE_S + count)
        await settled(lambda: here.runtime.live_requests == 0, "end of all requests")
        await settled(lambda: here.engine.snapshots[-1].used_blocks == 0, "free blocks")
        await settled(
            lambda: trio.lowlevel.current_statistics().tasks_living <= start, "end of all tasks"
        )
        assert not here.engine.has_work
        assert here.runtime._handles == {}
        assert here.runtime._requests.child_tasks == frozenset()
