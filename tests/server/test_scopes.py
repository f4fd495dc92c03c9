"""Contract §1, §9, §10: whatever ends a request ends it once and frees all it held."""

from __future__ import annotations

import gc
import itertools
import logging

import pytest
import trio
from tests.server.reading import CHAT, STREAM, chunks, error, events, held, text
from trio.testing import wait_all_tasks_blocked

from triolet.config import Config
from triolet.core import CancelCause, EngineRequest, RequestId, SamplingParams
from triolet.output.detokenizer import Detokenizer
from triolet.output.stops import StopMatcher
from triolet.runtime.lifecycle import Phase, TextOptions
from triolet.runtime.request import RequestHandle
from triolet.server.event_stream import ChunkEncoder, FoldedChoice
from triolet.testing.asgi import AsgiClient, open_server
from triolet.testing.engine import ScriptedBackend, say, say_each, serve_script
from triolet.testing.faults import WrongId

#: Prompt tokens of CHAT.
SIZE = 6
# Short of what is tokenized in a thread, which a virtual clock would not wait for.
LONG = {**STREAM, "messages": [{"role": "user", "content": "x" * 1900}]}
PATH = "/v1/chat/completions"


@pytest.fixture
def no_gc():
    """Nothing may rely on the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def outcomes(caplog):
    """The outcomes of the requests that ended, in order."""
    caplog.set_level(logging.INFO, logger="triolet.requests")

    def ended() -> list[str]:
        return [record.args[1] for record in caplog.records if record.name == "triolet.requests"]

    return ended


def served(**options):
    return serve_script(ScriptedBackend(say("ab " * 1000), **options))


async def settle() -> None:
    """Let everything happen that needs no passing of time."""
    await wait_all_tasks_blocked()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_while_decoding_frees_all_within_a_step(mock_clock, outcomes, stream):
    async with open_server(served(step_s=1.0)) as server:
        exchange = server.client.start("POST", PATH, json_body={**LONG, "stream": stream})
        for _ in range(20):
            await settle()
            mock_clock.jump(1.0)
        await settle()
        blocks, rows, live = held(server)
        assert blocks > 0
        assert (rows, live) == (1, 1)
        exchange.disconnect()
        await settle()  # no step passes
        assert held(server) == (0, 0, 0)
        assert outcomes() == ["cancelled:disconnect"]


@pytest.mark.usefixtures("no_gc")
async def test_a_disconnect_in_the_middle_of_prefill_frees_all(mock_clock, outcomes):
    async with open_server(served(step_s=1.0, max_num_batched_tokens=256)) as server:
        exchange = server.client.start("POST", PATH, json_body=LONG)
        for _ in range(3):
            await settle()
            mock_clock.jump(1.0)
        await settle()
        statistics = server.runtime.backend().statistics()
        assert 0 < statistics.steps * 256 < 1900
        assert statistics.output_tokens == 0
        exchange.disconnect()
        await settle()
        assert held(server) == (0, 0, 0)
        assert outcomes() == ["cancelled:disconnect"]


@pytest.mark.usefixtures("no_gc")
async def test_a_disconnect_in_the_queue_never_costs_a_step(mock_clock, outcomes):
    async with open_server(served(step_s=1.0, max_num_seqs=1)) as server:
        first = server.client.start("POST", PATH, json_body=STREAM)
        await settle()
        second = server.client.start("POST", PATH, json_body=LONG)
        await settle()
        second.disconnect()
        await settle()
        assert outcomes() == ["cancelled:disconnect"]
        mock_clock.jump(1.0)
        await settle()
        statistics = server.runtime.backend().statistics()
        assert (statistics.waiting, statistics.prompt_tokens) == (0, 6)
        first.disconnect()
        await settle()
        assert held(server) == (0, 0, 0)


async def test_a_stop_string_frees_the_engine_at_once(mock_clock):
    async with open_server(served(step_s=1.0)) as server:
        exchange = server.client.start("POST", PATH, json_body={**STREAM, "stop": " "})
        for _ in range(4):
            await settle()
            mock_clock.jump(1.0)
        await settle()
        # Nobody has read the answer yet, and the engine is free all the same.
        assert held(server) == (0, 0, 0)
        assert text(chunks(await exchange.read())) == "ab"


async def test_a_choice_that_a_stop_string_ends_frees_its_row_while_others_go_on(mock_clock):
    backend = ScriptedBackend(say_each("a. and on and on", "b" * 50), step_s=1.0)
    async with open_server(serve_script(backend)) as server:
        exchange = server.client.start(
            "POST", PATH, json_body={**STREAM, "n": 2, "stop": ".", "max_tokens": 9}
        )
        rows = []
        for _ in range(5):
            await settle()
            rows.append(backend.statistics().used_rows)
            mock_clock.jump(1.0)
        # Begun with, "a" and "b", "." and "b": the next step is the other's alone.
        assert rows[-2:] == [1, 1]
        assert max(rows) == 2
        mock_clock.autojump_threshold = 0
        said = chunks(await exchange.read())
    assert [
        sum(
            len(c["choices"][0]["delta"].get("content", ""))
            for c in said
            if c["choices"][0]["index"] == index
        )
        for index in (0, 1)
    ] == [1, 9]


async def test_repeated_and_late_aborts_are_counted_no_ops(mock_clock):
    async with open_server(served(step_s=1.0)) as server:
        backend = server.runtime.backend()
        exchange = server.client.start("POST", PATH, json_body=STREAM)
        await settle()
        (handle,) = server.runtime._handles.values()
        exchange.disconnect()
        await settle()
        aborted = backend.statistics().late_aborts
        for _ in range(3):
            handle.cancel("timeout")
            backend.abort(handle.id)
        backend.abort(RequestId("never heard of"))
        await settle()
        assert backend.statistics().late_aborts - aborted == 4
        assert handle.record.outcome == "cancelled:disconnect"


async def test_a_deadline_before_the_first_token_is_a_504(autojump_clock, outcomes):
    async with open_server(served(step_s=10.0)) as server:
        response = await server.client.request(
            "POST", PATH, json_body=STREAM, headers={"X-Request-Timeout": "3"}
        )
        assert held(server) == (0, 0, 0)
    assert response.status == 504
    assert response.headers["x-should-retry"] == "false"
    assert error(response)["code"] == "timeout"
    assert outcomes() == ["cancelled:timeout"]


async def test_a_deadline_after_it_is_an_error_event(autojump_clock, outcomes):
    async with open_server(served(step_s=1.0), Config(request_timeout=3.5)) as server:
        response = await server.client.request("POST", PATH, json_body={**STREAM, "timeout": 1e9})
    *deltas, last = events(response.body)
    assert text(deltas) == "ab "
    assert last["error"]["code"] == "timeout"
    assert not response.complete
    assert outcomes() == ["cancelled:timeout"]


async def test_a_drain_lets_running_requests_finish_and_refuses_new_ones(autojump_clock):
    backend = ScriptedBackend(say("abcdef"), step_s=1.0)
    async with open_server(serve_script(backend), Config(drain_timeout=20)) as server:
        exchange = server.client.start("POST", PATH, json_body=STREAM)
        await exchange.next_body()
        server.runtime.drain()
        refused = await server.client.request("POST", PATH, json_body=CHAT)
        ready = await server.client.request("GET", "/ready")
        health = await server.client.request("GET", "/health")
        response = await exchange.read()
        await server.runtime.wait_stopped()
    assert (refused.status, error(refused)["code"]) == (503, "draining")
    assert refused.headers["retry-after"] == "5"
    assert (ready.status, health.status) == (503, 200)
    assert events(response.body)[-1] == "[DONE]"


async def test_what_outlasts_the_drain_ends_with_an_error_event(autojump_clock, outcomes):
    async with open_server(served(step_s=1.0), Config(drain_timeout=5)) as server:
        exchange = server.client.start("POST", PATH, json_body=STREAM)
        await exchange.next_body()
        started = trio.current_time()
        server.runtime.drain()
        response = await exchange.read()
        await server.runtime.wait_stopped()
        assert trio.current_time() - started == pytest.approx(5)
    assert error_of_stream(response) == "shutdown"
    assert outcomes() == ["cancelled:shutdown"]


async def test_a_second_drain_ends_them_at_once(autojump_clock):
    async with open_server(served(step_s=1.0), Config(drain_timeout=500)) as server:
        exchange = server.client.start("POST", PATH, json_body=STREAM)
        await exchange.next_body()
        started = trio.current_time()
        server.runtime.drain()
        server.runtime.drain()
        response = await exchange.read()
        await server.runtime.wait_stopped()
        assert trio.current_time() == started
    assert error_of_stream(response) == "shutdown"


async def test_a_client_that_does_not_read_cannot_hold_the_drain(autojump_clock):
    async with open_server(served(), Config(drain_timeout=0)) as server:
        server.client.start("POST", PATH, json_body=STREAM)
        await settle()
        server.runtime.drain()
        with trio.fail_after(1):
            await server.runtime.wait_stopped()
        assert held(server) == (0, 0, 0)


async def test_a_dead_engine_fails_every_request_and_stops_the_server(autojump_clock, outcomes):
    backend = ScriptedBackend(say("ab " * 1000), step_s=1.0, die_after_steps=3)
    async with open_server(serve_script(backend)) as server:
        exchange = server.client.start("POST", PATH, json_body=STREAM)
        response = await exchange.read()
        await server.runtime.wait_stopped()
        refused = await server.client.request("POST", PATH, json_body=CHAT)
        health = await server.client.request("GET", "/health")
    assert error_of_stream(response) == "engine_down"
    assert (refused.status, error(refused)["code"]) == (503, "engine_down")
    assert health.status == 503
    assert server.runtime.failure is not None
    assert server.runtime.phase is Phase.STOPPED
    assert outcomes() == ["failed", "rejected"]


@pytest.mark.slow
async def test_a_reader_that_lags_pauses_its_request_and_loses_nothing(autojump_clock):
    config = Config(max_stream_buffer=4096)
    async with open_server(served(step_s=0.001), config) as server:
        backend = server.runtime.backend()
        lagging = server.client.start("POST", PATH, json_body=STREAM)
        await lagging.next_message()
        other = await server.client.request("POST", PATH, json_body=STREAM)
        assert text(chunks(other)) == "ab " * 1000
        statistics = backend.statistics()
        assert statistics.paused == 1
        (handle,) = server.runtime._handles.values()
        # What was under way when the pause took effect: one step.
        assert handle._hub.log.peak_bytes <= 4096 + 64
        body = b""
        while not body.endswith(b"[DONE]\n\n"):
            body += await lagging.next_body()
        assert text(events(body)[:-1]) == "ab " * 1000
        assert backend.statistics().paused == 0


@pytest.mark.slow
async def test_tokens_that_nobody_takes_pause_a_request_long_before_their_bytes_do(autojump_clock):
    async with open_server(served(step_s=0.001), Config(max_stream_tokens=100)) as server:
        lagging = server.client.start("POST", PATH, json_body=STREAM)
        await lagging.next_message()
        await trio.sleep(60)
        statistics = server.runtime.backend().statistics()
        assert statistics.paused == 1
        # What the writer had taken, the bound, and what was under way.
        assert statistics.output_tokens < 110
        body = b""
        while not body.endswith(b"[DONE]\n\n"):
            body += await lagging.next_body()
        assert text(events(body)[:-1]) == "ab " * 1000


async def test_a_full_server_says_when_to_come_back(autojump_clock, outcomes):
    config = Config(max_num_seqs=1, max_num_queued_reqs=1)
    async with open_server(served(step_s=1.0, max_num_seqs=1), config) as server:
        held_open = [server.client.start("POST", PATH, json_body=STREAM) for _ in range(2)]
        await settle()
        refused = await server.client.request("POST", PATH, json_body=STREAM)
        assert (refused.status, error(refused)["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        for exchange in held_open:
            exchange.disconnect()
        await settle()
        assert held(server) == (0, 0, 0)
        metrics = (await server.client.request("GET", "/metrics")).body.decode()
    assert 'triolet_requests_total{outcome="rejected"} 1.0' in metrics
    assert 'triolet_requests_total{outcome="cancelled:disconnect"} 2.0' in metrics


async def test_who_is_still_being_read_has_a_place_too(autojump_clock, outcomes):
    config = Config(max_num_seqs=1, max_num_queued_reqs=0)
    async with open_server(served(), config) as server:
        uploading = server.client.start("POST", PATH, body=None, more_body=True)
        await settle()
        assert server.runtime.live_requests == 1
        refused = await server.client.request("POST", PATH, json_body=CHAT)
        assert (refused.status, error(refused)["code"]) == (429, "queue_full")
        uploading.disconnect()
        await settle()
        assert held(server) == (0, 0, 0)
        assert outcomes() == ["rejected", "cancelled:disconnect"]


async def test_an_upload_counts_against_the_deadline_of_its_request(autojump_clock, outcomes):
    async with open_server(served(), Config(request_timeout=7)) as server:
        started = trio.current_time()
        uploading = server.client.start("POST", PATH, body=None, more_body=True)
        response = await uploading.read()
        assert trio.current_time() - started == pytest.approx(7)
        assert (response.status, error(response)["code"]) == (504, "timeout")
        assert held(server) == (0, 0, 0)
    assert outcomes() == ["cancelled:timeout"]


async def test_a_drain_before_the_first_byte_is_a_503_that_clients_try_again(autojump_clock):
    async with open_server(served(step_s=100.0), Config(drain_timeout=1)) as server:
        exchange = server.client.start("POST", PATH, json_body=STREAM)
        await settle()
        server.runtime.drain()
        response = await exchange.read()
    assert (response.status, error(response)["code"]) == (503, "draining")
    assert response.headers["retry-after"] == "5"


async def test_a_book_that_cannot_be_written_ends_nobody_elses_request(autojump_clock):
    async with open_server(served(step_s=0.1)) as server:

        def full_disk(_):
            raise OSError("no space left on device")

        server.runtime.on_record = full_disk
        other = server.client.start("POST", PATH, json_body={**STREAM, "max_tokens": 50})
        await server.client.request("POST", PATH, json_body={**CHAT, "max_tokens": 2})
        assert chunks(await other.read())
        assert held(server) == (0, 0, 0)


class Oops(Exception):  # noqa: N818 - not an error of anybody's, a bug
    """What nobody has thought of."""


def raise_at(monkeypatch, owner, name, number):
    """Let one call of a method raise, by its number from now on."""
    calls, real = itertools.count(1), getattr(owner, name)

    def method(*args, **options):
        if next(calls) == number:
            raise Oops
        return real(*args, **options)

    monkeypatch.setattr(owner, name, method)


@pytest.mark.parametrize("cause", ["disconnect", "timeout", "slow_client"])
async def test_a_bug_in_the_last_flush_of_a_request_is_its_own(
    autojump_clock, outcomes, monkeypatch, cause
):
    async with open_server(served(step_s=1.0)) as server:
        other = server.client.start("POST", PATH, json_body={**STREAM, "max_tokens": 20})
        await other.next_body()
        mine = server.client.start("POST", PATH, json_body={**STREAM, "timeout": 5})
        await mine.next_body()
        raise_at(monkeypatch, Detokenizer, "finish", 1)
        if cause == "slow_client":
            tuple(server.runtime._handles.values())[-1].cancel(CancelCause.SLOW_CLIENT)
        if cause == "disconnect":
            mine.disconnect()
        else:
            assert error_of_stream(await mine.read()) == cause
        await settle()
        assert held(server)[1:] == (1, 1)
        rest = await other.read()
        assert rest.body.endswith(b"[DONE]\n\n")
        assert server.runtime.phase is Phase.READY
        assert held(server) == (0, 0, 0)
    assert outcomes() == [f"cancelled:{cause}", "finished"]


@pytest.mark.parametrize("name", ["push", "finish"])
@pytest.mark.parametrize("flush", [True, False])
async def test_a_bug_in_the_output_of_a_request_is_its_own(
    autojump_clock, outcomes, monkeypatch, name, flush
):
    async with open_server(served(step_s=1.0)) as server:
        mine = server.client.start("POST", PATH, json_body={**STREAM, "max_tokens": 5})
        await mine.next_body()
        other = server.client.start("POST", PATH, json_body={**STREAM, "max_tokens": 20})
        raise_at(monkeypatch, Detokenizer, name, 1)
        if flush:
            raise_at(monkeypatch, StopMatcher, "finish", 1)
        assert error_of_stream(await mine.read()) == "output_error"
        assert chunks(await other.read())
        assert held(server) == (0, 0, 0)
    assert outcomes() == ["failed", "finished"]


@pytest.mark.parametrize("number", [1, 3])
async def test_a_bug_in_writing_a_stream_is_a_failure_that_its_client_is_told(
    autojump_clock, outcomes, monkeypatch, number
):
    raise_at(monkeypatch, ChunkEncoder, "encode", number)
    async with open_server(served(step_s=1.0)) as server:
        response = await server.client.request("POST", PATH, json_body=STREAM)
        assert held(server) == (0, 0, 0)
        assert trio.current_time() < 9
        after = await server.client.request("POST", PATH, json_body={**STREAM, "max_tokens": 2})
        assert chunks(after)
    if number == 1:
        assert (response.status, error(response)["code"]) == (500, "output_error")
    else:
        assert error_of_stream(response) == "output_error"
    assert outcomes() == ["failed", "finished"]


async def test_a_bug_in_writing_a_body_is_a_500(autojump_clock, outcomes, monkeypatch):
    raise_at(monkeypatch, FoldedChoice, "delta", 1)
    backend = ScriptedBackend(say("abc"), step_s=1.0)
    async with open_server(serve_script(backend)) as server:
        response = await server.client.request("POST", PATH, json_body=CHAT)
        assert held(server) == (0, 0, 0)
    assert (response.status, error(response)["code"]) == (500, "output_error")
    # All of it had been generated.
    assert outcomes() == ["finished"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_send_that_says_that_the_client_has_gone_is_no_bug(
    autojump_clock, outcomes, stream
):
    async with open_server(served(step_s=1.0)) as server:
        app, sent = server.client.app, []

        async def broken(scope, receive, _):
            async def send(message):
                sent.append(message["type"])
                await trio.lowlevel.checkpoint()
                raise BrokenPipeError

            await app(scope, receive, send)

        client = AsgiClient(broken, server.client.nursery)
        for body in ({**CHAT, "stream": stream, "max_tokens": 3}, {}):
            response = await client.request("POST", PATH, json_body=body)
            assert response.status == 0
        assert held(server) == (0, 0, 0)
    assert sent == ["http.response.start"] * 2
    assert outcomes() == ["cancelled:disconnect" if stream else "finished", "rejected"]


def handles() -> int:
    return sum(type(found) is RequestHandle for found in gc.get_objects())


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("cause", ["timeout", "output_error", "queue_full", "draining"])
async def test_who_is_refused_before_the_headers_is_gone_without_a_collection(
    autojump_clock, monkeypatch, stream, cause
):
    # Pytest keeps what is logged, and with it the traceback.
    unheard = logging.Logger("unheard")  # noqa: LOG001 - so that it has no parent
    monkeypatch.setattr("triolet.runtime.request.logger", unheard)
    faults = (WrongId(2),) if cause == "output_error" else ()
    config = Config(max_num_queued_tokens=SIZE, drain_timeout=1)
    backend = ScriptedBackend(say("ab " * 50), step_s=10.0, faults=faults)
    async with open_server(serve_script(backend), config) as server:
        before = handles()
        body = {**CHAT, "stream": stream, **({"timeout": 3} if cause == "timeout" else {})}
        waiting = server.client.start("POST", PATH, json_body=body)
        await settle()
        if cause != "queue_full":
            waiting.disconnect()
            await settle()
        exchange = server.client.start("POST", PATH, json_body=body)
        await settle()
        if cause == "draining":
            server.runtime.drain()
        response = await exchange.read()
        assert error(response)["code"] == cause
        waiting.disconnect()
        await trio.sleep(20)
        assert handles() == before


async def test_a_backend_that_refuses_a_request_leaves_nothing_of_it(autojump_clock, outcomes):
    def scripts(request):
        if request.id == "a:1":
            raise LookupError(request.id)
        return say("a")(request)

    requests = tuple(
        EngineRequest(RequestId(f"a:{number}"), (1,), SamplingParams(max_tokens=1))
        for number in range(3)
    )
    async with open_server(serve_script(ScriptedBackend(scripts))) as server:
        with pytest.raises(LookupError), server.runtime.arrive(RequestId("a")) as arrival:
            arrival.admit(requests, TextOptions(), timeout_s=1)
        assert held(server) == (0, 0, 0)
        assert (server.runtime.queued_requests, server.runtime.queued_tokens) == (0, 0)
        assert server.runtime.backend().statistics().waiting == 0
        assert server.runtime._handles == {}
        assert outcomes() == ["failed"]


def error_of_stream(response) -> str:
    assert response.status == 200
    assert not response.complete
    *deltas, last = events(response.body)
    assert "[DONE]" not in deltas
    code: str = last["error"]["code"]
    return code
