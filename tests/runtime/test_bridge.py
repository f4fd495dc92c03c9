"""The engine thread and Trio, with a fake engine that counts down."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager
from functools import partial

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from triolet.core import (
    EngineRequest,
    EngineStatistics,
    FinishReason,
    RequestId,
    SamplingParams,
    StepResult,
    TokenOutput,
)
from triolet.errors import EngineDownError
from triolet.runtime.bridge import LAST_STEP_S, EngineThread, Inbox

A, B = RequestId("a"), RequestId("b")


def request(request_id: RequestId, tokens: int) -> EngineRequest:
    return EngineRequest(request_id, (1,), SamplingParams(max_tokens=tokens))


async def until(condition) -> None:
    """Wait for another thread, which has no event to wait on. Takes none of the clock's time."""
    for _ in range(10_000):
        if condition():
            return
        await wait_all_tasks_blocked(0.001)
    raise TimeoutError


@attrs.define(eq=False)
class CountingEngine:
    """One token per live request and step; can be held inside a step, and told to die."""

    die_at: int | None = None
    gate: threading.Semaphore | None = None
    live: dict[RequestId, int] = attrs.field(factory=dict)
    paused: set[RequestId] = attrs.field(factory=set)
    aborts: list[RequestId] = attrs.field(factory=list)
    ended: list[tuple[RequestId, int]] = attrs.field(factory=list)
    #: All that it was told, in order.
    told: list[str] = attrs.field(factory=list)
    steps: int = 0
    #: Released whenever a step begins.
    begun: threading.Semaphore = attrs.field(factory=lambda: threading.Semaphore(0))

    @property
    def has_work(self) -> bool:
        return bool(self.live.keys() - self.paused)

    def add(self, new: EngineRequest) -> None:
        self.told.append(f"add {new.id}")
        self.live[new.id] = new.sampling.max_tokens

    def end_choice(self, request_id: RequestId, choice: int) -> None:
        self.told.append(f"end {request_id} {choice}")
        self.ended.append((request_id, choice))

    def abort(self, request_id: RequestId) -> None:
        self.told.append(f"abort {request_id}")
        self.aborts.append(request_id)
        self.live.pop(request_id, None)

    def pause(self, request_id: RequestId) -> None:
        self.paused.add(request_id)

    def resume(self, request_id: RequestId) -> None:
        self.paused.discard(request_id)

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(steps=self.steps, running=len(self.live))

    def step(self) -> StepResult:
        self.begun.release()
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
            thread.end_choice(gone, 0)
            thread.abort(gone)
        assert thread._inbox == Inbox()
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


# Single choices.


def test_a_choice_ends_after_its_request_was_submitted_and_once():
    inbox, engine = Inbox(), CountingEngine()
    inbox.end_choice(A, 1)
    inbox.submitted[A] = request(A, 3)
    for choice in (1, 0, 1):
        inbox.end_choice(A, choice)
    inbox.deliver(engine)
    assert engine.told == ["add a", "end a 0", "end a 1"]


def test_an_abort_takes_the_place_of_ended_choices_and_forbids_more():
    inbox, engine = Inbox(), CountingEngine()
    inbox.end_choice(A, 0)
    inbox.abort(A)
    inbox.end_choice(A, 1)
    inbox.deliver(engine)
    assert engine.told == ["abort a"]


WORDS = st.tuples(
    st.sampled_from(["submit", "end_choice", "pause", "resume", "abort"]), st.sampled_from([A, B])
)


@settings(max_examples=50)
@given(st.lists(st.tuples(WORDS, st.integers(0, 1)), max_size=8))
def test_an_inbox_is_bounded_by_live_requests_and_never_loses_an_end(words):
    """Each request is submitted at most once and left alone after its abort, as by a handle."""
    thread, engine = EngineThread(CountingEngine()), CountingEngine()
    submitted, aborted = set(), set()
    ended = {A: set(), B: set()}
    for (word, request_id), choice in words:
        if request_id in aborted or (word == "submit" and request_id in submitted):
            continue
        if word == "submit":
            submitted.add(request_id)
            thread.submit(request(request_id, 3))
        elif word == "end_choice":
            ended[request_id].add(choice)
            thread.end_choice(request_id, choice)
        else:
            getattr(thread, word)(request_id)
        if word == "abort":
            aborted.add(request_id)
    thread._inbox.deliver(engine)
    # One not submitted here was submitted before; one submitted and aborted here never was.
    assert set(engine.aborts) == aborted - submitted
    assert set(engine.live) == submitted - aborted
    for request_id in (A, B):
        got = [choice for id_, choice in engine.ended if id_ == request_id]
        assert got == sorted(set() if request_id in aborted else ended[request_id])


async def test_a_choice_ends_at_the_next_step():
    engine = CountingEngine(gate=threading.Semaphore(0))
    async with running(EngineThread(engine)) as (thread, steps):
        thread.submit(request(A, 1_000_000))
        await begun(engine)
        thread.end_choice(A, 2)
        engine.gate.release(2)
        await steps.receive()
        await begun(engine)
        assert engine.ended == [(A, 2)]
        engine.gate.release(100)


# Steps that do not end.


@asynccontextmanager
async def running(thread):
    """The bridge runs in this block, and is cancelled at its end."""
    send, receive = trio.open_memory_channel[StepResult](4)
    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run, send)
        yield thread, receive
        nursery.cancel_scope.cancel()


async def begun(engine):
    """Wait for a step to begin."""
    assert await trio.to_thread.run_sync(partial(engine.begun.acquire, timeout=10))


async def advance(clock, seconds, *, look_s=1.0):
    """Let time pass as it does for a watcher that is never late."""
    for _ in range(round(seconds / look_s)):
        clock.jump(look_s)
        await wait_all_tasks_blocked()


@pytest.fixture
def stuck():
    """An engine whose steps wait for a gate that opens after the test at the latest."""
    engine = CountingEngine(gate=threading.Semaphore(0))
    yield engine
    engine.gate.release(1000)


async def test_a_step_that_takes_too_long_is_the_death_of_the_engine(mock_clock, stuck, caplog):
    thread = EngineThread(stuck, stall_timeout_s=60)
    with pytest.RaisesGroup(pytest.RaisesExc(EngineDownError, match="longer than 60 s")):
        async with running(thread) as (_, steps):
            thread.submit(request(A, 5))
            await begun(stuck)
            await advance(mock_clock, 59)
            assert thread.healthy()
            await advance(mock_clock, 3)
            with pytest.raises(trio.EndOfChannel):
                await steps.receive()
            assert not thread.healthy()
    assert thread.abandoned
    # The log says where.
    assert "self.gate.acquire(" in caplog.text
    assert "Traceback" not in caplog.text


async def test_steps_that_end_in_time_may_take_as_long_together_as_they_like(mock_clock, stuck):
    async with running(EngineThread(stuck, stall_timeout_s=60)) as (thread, steps):
        thread.submit(request(A, 1000))
        for _ in range(5):
            await begun(stuck)
            await advance(mock_clock, 58)
            stuck.gate.release()
            await steps.receive()
        assert thread.healthy()
        stuck.gate.release(2)


async def test_a_process_that_was_stopped_with_all_its_threads_has_not_stalled(mock_clock, stuck):
    async with running(EngineThread(stuck, stall_timeout_s=60)) as (thread, steps):
        thread.submit(request(A, 1000))
        await begun(stuck)
        for _ in range(10):
            await advance(mock_clock, 3600, look_s=3600)
        assert thread.healthy()
        stuck.gate.release(2)
        await steps.receive()


async def test_to_wait_for_a_lagging_event_loop_is_not_to_stall(mock_clock):
    async with running(EngineThread(CountingEngine(), stall_timeout_s=60)) as (thread, steps):
        thread.submit(request(A, 1_000_000))
        await until(lambda: steps.statistics().tasks_waiting_send == 1)
        await advance(mock_clock, 100)
        assert thread.healthy()
        mock_clock.autojump_threshold = 1.0  # a thread that does not come back is given up then
    # Nor does it hold up a stop.
    assert not thread._left_behind


async def test_to_have_nothing_to_do_is_not_to_stall(mock_clock):
    async with running(EngineThread(CountingEngine(), stall_timeout_s=60)) as (thread, steps):
        await until(lambda: thread._wake.statistics().tasks_waiting)
        await advance(mock_clock, 100)
        thread.submit(request(A, 1))
        await finish(steps, A)
        await until(lambda: thread._wake.statistics().tasks_waiting)
        mock_clock.autojump_threshold = 1.0  # as above
    assert not thread._left_behind


async def test_without_a_timeout_a_step_may_take_for_ever(mock_clock, stuck):
    async with running(EngineThread(stuck)) as (thread, steps):
        thread.submit(request(A, 1000))
        await begun(stuck)
        await advance(mock_clock, 100_000, look_s=1000)
        assert thread.healthy()
        stuck.gate.release(2)
        await steps.receive()


async def test_a_stop_waits_for_a_step_that_hangs_but_a_moment(autojump_clock, stuck):
    thread = EngineThread(stuck)
    async with running(thread):
        thread.submit(request(A, 5))
        await begun(stuck)
        stopped = trio.current_time()
    assert trio.current_time() - stopped == pytest.approx(LAST_STEP_S)
    assert thread.abandoned
    assert not thread.healthy()


async def test_a_stop_waits_for_a_step_that_ends(mock_clock, stuck):
    async with stopped_during_a_step(stuck) as thread:
        stuck.gate.release()
    assert not thread.abandoned
    assert stuck.steps == 1


async def test_a_death_during_a_stop_is_nobodys_business(mock_clock, stuck):
    stuck.die_at = 1
    async with stopped_during_a_step(stuck) as thread:
        stuck.gate.release()
    assert not thread.abandoned


@asynccontextmanager
async def stopped_during_a_step(engine):
    """The block runs when the bridge has heard that it shall stop; the engine is in a step."""
    thread = EngineThread(engine)
    send, _receive = trio.open_memory_channel[StepResult](4)
    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run, send)
        thread.submit(request(A, 5))
        await begun(engine)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
            yield thread


@pytest.mark.parametrize("die_at", [None, 1], ids=["it ends", "it fails"])
async def test_an_abandoned_step_that_ends_after_all_changes_nothing(
    monkeypatch, caplog, capsys, stuck, die_at
):
    monkeypatch.setattr("triolet.runtime.bridge.LAST_STEP_S", 0.0)
    stuck.die_at = die_at
    thread = EngineThread(stuck)
    async with running(thread):
        thread.submit(request(A, 5))
        await begun(stuck)
    thread.submit(request(B, 5))
    before = thread.statistics()
    stuck.gate.release(1000)
    with trio.fail_after(10):
        await thread.wait_returned()
    assert not thread.abandoned
    assert stuck.steps == 1
    assert thread.statistics() == before
    assert (caplog.text, *capsys.readouterr()) == ("", "", "")


def test_a_thread_that_outlives_its_event_loop_returns_in_silence(caplog, capsys, stuck):
    thread = EngineThread(stuck)

    async def main():
        async with running(thread):
            thread.submit(request(A, 5))
            await begun(stuck)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    (worker,) = [worker for worker in threading.enumerate() if worker.ident == thread._ident]
    assert thread.abandoned
    stuck.gate.release(1000)
    await_return(thread)
    assert stuck.steps == 1
    assert worker.daemon
    assert (caplog.text, *capsys.readouterr()) == ("", "", "")


def test_a_thread_on_its_way_to_an_event_loop_that_ended_returns_in_silence(
    monkeypatch, caplog, capsys
):
    """It was told to stop between its last look and its call."""
    on_its_way, gate = threading.Event(), threading.Event()
    call = trio.from_thread.run

    def late(*args):
        on_its_way.set()
        assert gate.wait(10)
        return call(*args)

    monkeypatch.setattr(trio.from_thread, "run", late)
    thread = EngineThread(CountingEngine())

    async def main():
        async with running(thread):
            assert await trio.to_thread.run_sync(on_its_way.wait, 10)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert thread.abandoned
    gate.set()
    await_return(thread)
    assert (caplog.text, *capsys.readouterr()) == ("", "", "")


def await_return(thread):
    """Wait, without an event loop, for an abandoned thread."""
    trio.run(thread.wait_returned)
