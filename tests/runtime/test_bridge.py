"""The engine thread and Trio, with a fake engine that counts down."""

from __future__ import annotations

import threading

import attrs
import pytest
import trio

from triolet.core import (
    EngineRequest,
    EngineStatistics,
    FinishReason,
    RequestId,
    SamplingParams,
    StepResult,
    TokenOutput,
)
from triolet.runtime.bridge import EngineThread

A, B = RequestId("a"), RequestId("b")


def request(request_id: RequestId, tokens: int) -> EngineRequest:
    return EngineRequest(request_id, (1,), SamplingParams(max_tokens=tokens))


async def until(condition) -> None:
    """Wait for another thread, which has no event to wait on."""
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - as the docstring says
            await trio.sleep(0.001)


@attrs.define(eq=False)
class CountingEngine:
    """One token per live request and step; can be held inside a step, and told to die."""

    die_at: int | None = None
    gate: threading.Semaphore | None = None
    live: dict[RequestId, int] = attrs.field(factory=dict)
    paused: set[RequestId] = attrs.field(factory=set)
    aborts: list[RequestId] = attrs.field(factory=list)
    steps: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self.live.keys() - self.paused)

    def add(self, new: EngineRequest) -> None:
        self.live[new.id] = new.sampling.max_tokens

    def abort(self, request_id: RequestId) -> None:
        self.aborts.append(request_id)
        self.live.pop(request_id, None)

    def pause(self, request_id: RequestId) -> None:
        self.paused.add(request_id)

    def resume(self, request_id: RequestId) -> None:
        self.paused.discard(request_id)

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(steps=self.steps, running=len(self.live))

    def step(self) -> StepResult:
        if self.gate is not None:
            assert self.gate.acquire(timeout=10)
        self.steps += 1
        if self.steps == self.die_at:
            raise RuntimeError("the device is gone")
        outputs = []
        for request_id in self.live.keys() - self.paused:
            self.live[request_id] -= 1
            finish = None if self.live[request_id] else FinishReason.LENGTH
            outputs.append(TokenOutput(request_id, (self.steps,), finish))
        self.live = {request_id: left for request_id, left in self.live.items() if left}
        return StepResult(self.steps, tuple(outputs))


async def finish(steps: trio.MemoryReceiveChannel[StepResult], *ids: RequestId) -> dict:
    """All tokens until every one of these requests has finished."""
    got: dict[RequestId, list[int]] = {request_id: [] for request_id in ids}
    missing = set(ids)
    while missing:
        with trio.fail_after(10):
            step = await steps.receive()
        for output in step.outputs:
            got[output.request_id] += output.token_ids
            if output.finish is not None:
                missing.discard(output.request_id)
    return got


@pytest.fixture
async def bridge(nursery):
    """A running bridge over a counting engine, and the channel of its steps."""
    thread = EngineThread(CountingEngine())
    send, receive = trio.open_memory_channel[StepResult](4)
    await nursery.start(thread.run, send)
    yield thread, receive
    nursery.cancel_scope.cancel()


async def test_tokens_arrive_in_order(bridge):
    thread, steps = bridge
    thread.submit(request(A, 5))
    thread.submit(request(B, 3))
    got = await finish(steps, A, B)
    assert [len(got[A]), len(got[B])] == [5, 3]
    assert got[A] == sorted(got[A])


async def test_what_came_and_went_within_a_step_never_reaches_the_engine():
    engine = CountingEngine(gate=threading.Semaphore(0))
    thread = EngineThread(engine)
    send, receive = trio.open_memory_channel[StepResult](4)
    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run, send)
        thread.submit(request(B, 2))
        await until(lambda: B in engine.live)
        for number in range(1000):
            gone = RequestId(str(number))
            thread.submit(request(gone, 1_000_000))
            thread.pause(gone)
            thread.abort(gone)
        inbox = thread._inbox
        assert (inbox.submitted, inbox.paused, inbox.aborted) == ({}, {}, {})
        engine.gate.release(10)
        got = await finish(receive, B)
        assert len(got[B]) == 2
        assert engine.aborts == []
        nursery.cancel_scope.cancel()


async def test_an_abort_takes_effect_at_the_next_step():
    engine = CountingEngine(gate=threading.Semaphore(0))
    thread = EngineThread(engine)
    send, receive = trio.open_memory_channel[StepResult](4)
    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run, send)
        thread.submit(request(A, 1_000_000))
        thread.submit(request(B, 3))
        engine.gate.release()
        await receive.receive()
        thread.abort(A)
        engine.gate.release(2)
        # At most the step that was already under way mentions A once more.
        late = [await receive.receive(), await receive.receive()]
        assert A not in {output.request_id for output in late[1].outputs}
        assert A not in engine.live
        nursery.cancel_scope.cancel()


async def test_a_paused_engine_waits_and_resumes(bridge):
    thread, steps = bridge
    thread.pause(A)
    thread.submit(request(A, 2))
    thread.submit(request(B, 1))
    assert await finish(steps, B)
    thread.resume(A)
    got = await finish(steps, A)
    assert len(got[A]) == 2


async def test_a_lagging_event_loop_stops_the_engine_not_the_memory(bridge):
    thread, steps = bridge
    thread.submit(request(A, 1_000_000))
    await until(lambda: steps.statistics().current_buffer_used == 4)
    for _ in range(20):
        await trio.sleep(0.001)
    assert steps.statistics().current_buffer_used == 4
    # Four wait in the channel, one waits to get in.
    assert thread.engine.steps == 5


async def test_cancelling_ends_an_idle_engine():
    thread = EngineThread(CountingEngine())
    send, _receive = trio.open_memory_channel[StepResult](4)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(thread.run, send)
            assert thread.healthy()
            nursery.cancel_scope.cancel()
    assert not thread.healthy()


async def test_cancelling_ends_a_busy_engine_and_closes_its_channel():
    thread = EngineThread(CountingEngine())
    send, receive = trio.open_memory_channel[StepResult](4)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(thread.run, send)
            thread.submit(request(A, 1_000_000))
            await receive.receive()
            nursery.cancel_scope.cancel()
    async for _ in receive:  # ends: the channel was closed
        pass


async def test_a_dying_engine_raises_into_the_nursery():
    thread = EngineThread(CountingEngine(die_at=2))
    send, receive = trio.open_memory_channel[StepResult](4)
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="the device is gone")):
        async with trio.open_nursery() as nursery:
            await nursery.start(thread.run, send)
            thread.submit(request(A, 10))
            async for _ in receive:
                pass
    assert not thread.healthy()


async def test_statistics_are_those_of_the_last_step(bridge):
    thread, steps = bridge
    thread.submit(request(A, 3))
    await finish(steps, A)
    thread.abort(A)
    await until(lambda: thread.engine.aborts == [A])
    assert thread.statistics().steps == 3
