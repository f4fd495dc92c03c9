"""A witness sees what it is there for: each rule is broken once."""

from __future__ import annotations

import gc

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from triolet.config import Config
from triolet.core import EngineRequest, RequestId, SamplingParams
from triolet.testing.asgi import open_server
from triolet.testing.counting import CountingBackend
from triolet.testing.engine import ScriptedBackend, say, serve_script
from triolet.testing.faults import Crash, FailedStep
from triolet.testing.settled import Witness

pytestmark = pytest.mark.usefixtures("frozen_heap")

BODY = {"model": "scripted", "prompt": "hi", "stream": True, "max_tokens": 50}
REQUEST = EngineRequest(RequestId("a"), (1, 2), SamplingParams(max_tokens=9), n=2)


class Deaf(ScriptedBackend):
    """Does not do what it is told."""

    def __init__(self, *deaf, **options):
        super().__init__(say("ab " * 100), step_s=1.0, **options)
        for name in deaf:
            setattr(self, name, lambda *_: None)


async def broken_by(backend, *, leaves=True, config=None, reads=3):
    """What a witness says of one request that was read for a while."""
    counting = CountingBackend(backend)
    served = attrs.evolve(serve_script(backend), backend=counting)
    async with open_server(served, config) as server:
        witness = Witness.of(server.runtime, counting)
        exchange = server.client.start("POST", "/v1/completions", json_body=BODY)
        for _ in range(reads):
            await exchange.next_message()
        if leaves:
            exchange.disconnect()
        else:
            await exchange.read()
        del exchange
        await wait_all_tasks_blocked()
        return witness.broken()


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("faults", [(), (FailedStep(5),), (Crash(5),)])
async def test_a_server_that_does_what_it_should_has_settled(autojump_clock, leaves, faults):
    backend = ScriptedBackend(say("ab " * 100), step_s=1.0, faults=faults)
    assert await broken_by(backend, leaves=leaves) == []


async def test_what_the_engine_goes_on_with_is_seen(autojump_clock):
    broken = await broken_by(Deaf("abort"))
    assert "the server still holds running=1" in broken
    assert any("used_blocks" in sentence for sentence in broken)


async def test_a_pause_that_never_comes_is_seen(autojump_clock, monkeypatch):
    monkeypatch.setattr("triolet.runtime.request.decide", lambda *_, **__: None)
    broken = await broken_by(
        ScriptedBackend(say("ab " * 100)), config=Config(max_stream_buffer=100), reads=1
    )
    assert any("is not paused" in sentence for sentence in broken)


async def test_who_is_still_there_is_seen(autojump_clock):
    backend = CountingBackend(ScriptedBackend(say("ab " * 100), step_s=1.0))
    async with open_server(attrs.evolve(serve_script(), backend=backend)) as server:
        witness = Witness.of(server.runtime, backend)
        exchange = server.client.start("POST", "/v1/completions", json_body=BODY)
        await exchange.next_message()
        with pytest.raises(AssertionError, match="has not settled") as raised:
            await witness.expect_settled()
        told = str(raised.value)
        for sentence in ("live requests=1", "tasks are left", "has no record", "nor aborted"):
            assert sentence in told
        exchange.disconnect()
        del exchange
        await witness.expect_settled()


async def test_what_only_a_collection_would_free_is_seen(autojump_clock):
    backend = CountingBackend(ScriptedBackend(say("ab"), step_s=1.0))
    gc.disable()
    try:
        async with open_server(attrs.evolve(serve_script(), backend=backend)) as server:
            witness = Witness.of(server.runtime, backend)
            headers = {"X-Request-Timeout": "0.5"}
            for stream in (True, False):
                body = {**BODY, "stream": stream}
                refused = await server.client.request(
                    "POST", "/v1/completions", json_body=body, headers=headers
                )
                assert refused.status == 504
            await trio.sleep(2)
            await witness.expect_settled()
            exchange = server.client.start("POST", "/v1/completions", json_body=BODY)
            await wait_all_tasks_blocked()
            (handle,) = server.runtime._handles.values()
            # A cycle.
            handle._hub.log._open[-1] = handle
            exchange.disconnect()
            del exchange, handle
            await trio.sleep(2)
            assert witness.broken() == ["2 handles and logs are left"]
            gc.collect()
            assert witness.broken() == []
    finally:
        gc.enable()


def test_calls_that_no_one_needs_are_seen():
    counting = CountingBackend(ScriptedBackend())
    counting.abort(RequestId("never"))
    counting.end_choice(RequestId("never"), 0)
    counting.submit(REQUEST)
    assert counting.holds(REQUEST.id)
    assert counting.left() == ["a was neither ended by the engine nor aborted"]


async def test_what_is_told_twice_is_seen():  # noqa: ASYNC124 - the engine needs a clock
    counting = CountingBackend(ScriptedBackend())
    counting.submit(REQUEST)
    counting.end_choice(REQUEST.id, 1)
    counting.end_choice(REQUEST.id, 1)
    counting.abort(REQUEST.id)
    counting.abort(REQUEST.id)
    assert counting.broken == [
        "a: choice 1 was ended twice",
        "a was aborted 2 times",
    ]
    assert not counting.holds(REQUEST.id)
    assert counting.left() == []
    assert counting.calls == {"submit": 1, "end_choice": 2, "abort": 2}


async def test_an_engine_that_drops_a_request_without_a_word_is_seen():  # noqa: ASYNC124 - the engine needs a clock
    scripted = ScriptedBackend()
    counting = CountingBackend(scripted)
    counting.submit(REQUEST)
    scripted._engine.abort(REQUEST.id)
    counting.abort(REQUEST.id)
    assert counting.broken == ["the engine had dropped a without a word"]
