"""Engine faults on cue, through the real scheduler and engine loop."""

from __future__ import annotations

import pytest
import trio

from triolet.core import EngineRequest, FinishReason, RequestId, SamplingParams
from triolet.errors import EngineDownError
from triolet.prompt.bytelevel import BYTE_VOCAB_SIZE
from triolet.testing.engine import ScriptedBackend, say
from triolet.testing.faults import (
    ENGINE_FAULTS,
    IMPOSSIBLE_ID,
    Crash,
    FailedRequest,
    FailedStep,
    FaultTable,
    LateOutput,
    NeverReturns,
    OutOfBlocks,
    SlowStep,
    WrongId,
)


def request(name, prompt=b"hello", n=1, **sampling):
    sampling.setdefault("max_tokens", 9)
    return EngineRequest(RequestId(name), tuple(prompt), SamplingParams(**sampling), n)


async def results_of(backend, *requests, until=None, abort_after=None):
    """The results of all steps until every request has ended, or so many of them."""
    results, open_ = [], {r.id: r.n for r in requests}
    send, receive = trio.open_memory_channel(1)
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run, send)
        for asked in requests:
            backend.submit(asked)
        async for result in receive:
            results.append(result)
            for output in result.outputs:
                open_[output.request_id] -= output.finish is not None
            for failure in result.failures:
                open_[failure.request_id] = 0
            if result.step == abort_after:
                backend.abort(requests[0].id)
            if not any(open_.values()) or len(results) == until:
                break
        nursery.cancel_scope.cancel()
    return results


def ids_of(results, name):
    return [i for r in results for o in r.outputs if o.request_id == name for i in o.token_ids]


def failed(results):
    return [failure.request_id for result in results for failure in result.failures]


async def test_a_slow_step_takes_so_much_longer(autojump_clock):
    backend = ScriptedBackend(say("abc"), step_s=1.0, faults=[SlowStep(2, 5.0), SlowStep(2, 0.5)])
    results = await results_of(backend, request("a"))
    assert ids_of(results, "a")[:3] == list(b"abc")
    assert trio.current_time() == 4 + 5.5


async def test_a_failed_step_costs_its_requests_and_the_engine_lives_on(autojump_clock):
    backend = ScriptedBackend(say("abc"), max_num_seqs=1, faults=[FailedStep(2)])
    results = await results_of(backend, request("a"), request("b"))
    assert failed(results) == ["a"]
    assert ids_of(results, "b")[:3] == list(b"abc")
    assert backend.statistics().used_blocks == 0


async def test_a_crash_ends_the_run_and_nothing_comes_of_its_step(autojump_clock):
    backend = ScriptedBackend(say("abc"), faults=[Crash(3)])
    with pytest.RaisesGroup(pytest.RaisesExc(EngineDownError, match="crash")):
        await results_of(backend, request("a"))
    assert backend.statistics().steps == 2
    assert not backend.healthy()


async def test_a_step_that_never_returns_is_given_up_after_the_stall_timeout(autojump_clock):
    backend = ScriptedBackend(step_s=1.0, stall_timeout_s=60.0, faults=[NeverReturns(2)])
    with pytest.RaisesGroup(pytest.RaisesExc(EngineDownError, match="more than 60 s")):
        await results_of(backend, request("a"))
    assert trio.current_time() == 61


async def test_a_step_slower_than_the_stall_timeout_is_a_dead_engine_too(autojump_clock):
    backend = ScriptedBackend(stall_timeout_s=60.0, faults=[SlowStep(1, 60.5)])
    with pytest.RaisesGroup(EngineDownError):
        await results_of(backend, request("a"))


async def test_without_a_stall_timeout_a_stuck_step_lasts_until_it_is_cancelled(autojump_clock):
    with trio.move_on_after(1e5) as waiting:
        await results_of(ScriptedBackend(faults=[NeverReturns(1)]), request("a"))
    assert waiting.cancelled_caught


@pytest.mark.parametrize("others", [True, False])
async def test_a_late_output_names_a_request_after_its_abort(autojump_clock, others):
    backend = ScriptedBackend(say("abcdef"), faults=[LateOutput(1)])
    asked = [request("a"), request("b")][: 1 + others]
    backend.abort(RequestId("unknown"))  # does not count
    results = await results_of(backend, *asked, abort_after=2, until=3)
    assert len(ids_of(results[:2], "a")) == 2
    assert len(ids_of(results[2:], "a")) == 1
    assert len(ids_of(results, "b")) == (3 if others else 0)


async def test_without_blocks_a_request_waits_and_goes_on_later(autojump_clock):
    backend = ScriptedBackend(
        say("abcdef"), step_s=1.0, block_size=4, faults=[OutOfBlocks(1, 3), OutOfBlocks(6, 2)]
    )
    results = await results_of(backend, request("a"))
    assert ids_of(results, "a")[:6] == list(b"abcdef")
    # Three steps without a block for the prompt, two in which a decode may have to wait.
    assert 10 <= trio.current_time() <= 12
    assert backend.statistics().used_blocks == 0


async def test_a_failed_request_fails_alone(autojump_clock):
    backend = ScriptedBackend(say("abc"), faults=[FailedRequest(2, index=1)])
    results = await results_of(backend, request("a"), request("b", n=2), request("c"))
    assert failed(results) == ["b"]
    assert ids_of(results, "b") == list(b"aa")
    assert ids_of(results, "a")[:3] == ids_of(results, "c")[:3] == list(b"abc")


async def test_a_wrong_id_fails_its_request_where_the_engine_knows_the_vocabulary(autojump_clock):
    faults = [WrongId(1, index=1)]
    backend = ScriptedBackend(say("abc"), vocab_size=BYTE_VOCAB_SIZE, faults=faults)
    results = await results_of(backend, request("a"), request("b"))
    assert failed(results) == ["a"]
    assert ids_of(results, "b")[:3] == list(b"abc")


async def test_a_wrong_id_is_said_where_the_engine_does_not_know_it(autojump_clock):
    results = await results_of(ScriptedBackend(say("abc"), faults=[WrongId(1)]), request("a"))
    assert ids_of(results, "a")[:2] == [IMPOSSIBLE_ID, ord("b")]
    assert results[-1].outputs[-1].finish is FinishReason.STOP


def test_faults_of_all_kinds_go_together_in_any_order():
    faults = (
        SlowStep(1, 1.0),
        FailedStep(2),
        Crash(3),
        NeverReturns(4),
        LateOutput(1),
        OutOfBlocks(5, 2, free=3),
        FailedRequest(1, 2),
        WrongId(1, 3, token_id=9),
    )
    assert tuple(map(type, faults)) == ENGINE_FAULTS
    for table in (FaultTable(faults), FaultTable(faults[::-1])):
        assert [table.extra_s(step) for step in (1, 2, 4)] == [1.0, 0.0, float("inf")]
        assert [step for step in range(8) if table.fails(step)] == [2]
        assert [step for step in range(8) if table.crashes(step)] == [3]
        assert [table.free_blocks(step) for step in (4, 5, 6, 7)] == [None, 3, 3, None]
        assert [table.is_late(abort) for abort in (1, 2)] == [True, False]
        assert (table.tokens(1), table.tokens(2)) == ({2: -1, 3: 9}, {})


@pytest.mark.parametrize("fault", [SlowStep(1, 2.0), OutOfBlocks(2), LateOutput(1)])
async def test_what_does_no_harm_changes_no_text(autojump_clock, fault):
    backend = ScriptedBackend(say("abc"), step_s=0.1, faults=[fault])
    results = await results_of(backend, request("a"))
    assert ids_of(results, "a")[:3] == list(b"abc")
