"""The engine's faults: what the client sees, what is freed by when, what the metrics say."""

from __future__ import annotations

import pytest
import trio
from tests.server.reading import CHAT, STREAM, chunks, error, text

from triolet.config import Config
from triolet.runtime.lifecycle import Phase
from triolet.testing.engine import ScriptedBackend, say
from triolet.testing.faults import (
    Crash,
    FailedRequest,
    FailedStep,
    LateOutput,
    NeverReturns,
    OutOfBlocks,
    SlowStep,
    WrongId,
)

PATH = "/v1/chat/completions"
SAID = "ab " * 20


def engine(*faults, **options):
    return ScriptedBackend(say(SAID), step_s=1.0, stall_timeout_s=60.0, faults=faults, **options)


async def test_a_slow_step_delays_everyone_and_harms_nobody(autojump_clock, watched):
    async with watched(engine(SlowStep(5, 30.0))) as server:
        response = await server.client.request("POST", PATH, json_body=STREAM)
        assert text(chunks(response)) == SAID
        assert trio.current_time() == len(SAID) + 1 + 30
        await server.witness.expect_settled()
        assert await server.counted() == {"finished": 1}


async def test_a_failed_step_fails_its_requests_at_once_and_no_later_one(autojump_clock, watched):
    async with watched(engine(FailedStep(5))) as server:
        failed = await server.client.request("POST", PATH, json_body=STREAM)
        assert error(failed)["code"] == "engine_error"
        assert not failed.complete
        assert trio.current_time() == 5
        await server.witness.expect_settled()
        later = await server.client.request("POST", PATH, json_body=STREAM)
        assert text(chunks(later)) == SAID
        assert await server.counted() == {"failed": 1, "finished": 1}


@pytest.mark.parametrize(("fault", "at_s"), [(Crash(5), 5), (NeverReturns(5), 64)])
async def test_a_dead_engine_fails_everyone_and_stops_the_server(
    autojump_clock, watched, fault, at_s
):
    async with watched(engine(fault)) as server:
        streamed = server.client.start("POST", PATH, json_body=STREAM)
        whole = await server.client.request("POST", PATH, json_body=CHAT)
        assert error(await streamed.read())["code"] == "engine_down"
        assert (whole.status, error(whole)["code"]) == (503, "engine_down")
        assert trio.current_time() == at_s
        await server.runtime.wait_stopped()
        assert server.runtime.phase is Phase.STOPPED
        assert server.runtime.failure is not None
        assert (await server.client.request("GET", "/health")).status == 503
        assert server.witness.broken() == []
        assert await server.counted() == {"failed": 2}


async def test_late_output_of_an_aborted_request_reaches_nobody(autojump_clock, watched):
    async with watched(engine(LateOutput(1))) as server:
        leaving = server.client.start("POST", PATH, json_body=STREAM)
        await leaving.next_body()
        leaving.disconnect()
        del leaving
        response = await server.client.request("POST", PATH, json_body=STREAM)
        assert text(chunks(response)) == SAID
        await server.witness.expect_settled()
        assert await server.counted() == {"cancelled:disconnect": 1, "finished": 1}


async def test_without_blocks_requests_wait_until_there_are_some(autojump_clock, watched):
    async with watched(engine(OutOfBlocks(1, 20))) as server:
        response = await server.client.request("POST", PATH, json_body=STREAM)
        assert text(chunks(response)) == SAID
        assert trio.current_time() == len(SAID) + 1 + 20
        await server.witness.expect_settled()
        assert await server.counted() == {"finished": 1}


async def test_without_blocks_the_queue_s_deadline_still_holds(autojump_clock, watched):
    async with watched(engine(OutOfBlocks(1, 1000)), Config(queue_timeout=30)) as server:
        response = await server.client.request("POST", PATH, json_body=CHAT)
        assert (response.status, error(response)["code"]) == (504, "timeout")
        assert trio.current_time() == 30
        await server.witness.expect_settled()
        assert server.backend.statistics().prompt_tokens == 0
        assert await server.counted() == {"cancelled:timeout": 1}


@pytest.mark.parametrize(
    "backend",
    [engine(FailedRequest(1, 3)), engine(WrongId(1, 3)), engine(WrongId(1, 3), vocab_size=512)],
    ids=["numbers that are not finite", "a wrong id", "a wrong id that the engine finds"],
)
async def test_what_is_wrong_with_one_request_ends_it_alone(autojump_clock, watched, backend):
    async with watched(backend) as server:
        wrong = server.client.start("POST", PATH, json_body=STREAM)
        await wrong.next_message()
        response = await server.client.request("POST", PATH, json_body=STREAM)
        assert text(chunks(response)) == SAID
        assert server.outcomes() == ["failed", "finished"]
        assert not (await wrong.read()).complete
        del wrong
        await server.witness.expect_settled()
        assert await server.counted() == {"failed": 1, "finished": 1}
