"""Loads, run in virtual time against the scripted engine."""

from __future__ import annotations

from contextlib import asynccontextmanager

import attrs
import httpx2
import pytest
import trio
from tests.client.transports import AsgiTransport, PiecesTransport

from triolet.client import RefusedError, StreamCutError, connect
from triolet.client.bench import Run, Target, calibrate, prepare
from triolet.client.figures import CANCELLED, COMPLETED, UNMARKED, figure
from triolet.client.load import Load, Scale, arrivals
from triolet.testing.asgi import open_server
from triolet.testing.engine import Script, ScriptedBackend, say, serve_script

LAST = b'data: {"choices":[{"index":0,"delta":{"content":"b"},"finish_reason":"%b"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def scripted(backend):
    async with (
        open_server(serve_script(backend)) as server,
        connect("http://any", transport=AsgiTransport(server.client)) as client,
    ):
        yield Target(client, "scripted")


async def ask_once(transport, **more):
    async with connect("http://any", transport=transport) as client:
        target = Target(client, "m", **more)
        running = await prepare(target, Load(requests=1), scale=Scale())
        await running.run()
    return running.results


async def test_a_closed_loop_keeps_its_requests_in_flight(autojump_clock):
    load = Load(requests=6, concurrency=2, input_len=8, output_len=5)
    async with scripted(ScriptedBackend(say(), step_s=1.0)) as target:
        running = await prepare(target, load, scale=Scale(), warmup=1)
        await running.run()

    figures = figure(running.results)
    assert figures.ends == {COMPLETED: 6}
    assert {result.number for result in running.results} == set(range(6))
    assert figures.mean_concurrency == pytest.approx(2.0, abs=0.1)
    assert all(result.intended_s == result.sent_s for result in running.results)
    assert figures.ttft_s.max < 3
    assert figures.output_tokens == 30
    assert figures.itl_s.p50 == pytest.approx(1.0, abs=0.01)
    assert figures.tpot_s.p50 == pytest.approx(1.0, abs=0.01)
    assert figures.output_tokens_per_s == pytest.approx(2.0, abs=0.1)
    assert figures.counted_by_events == 0
    assert figures.tokens_per_write == pytest.approx(1.0)


async def test_an_open_loop_sends_at_its_times_whatever_the_server_does(autojump_clock):
    load = Load(requests=5, concurrency=None, rate=0.5, output_len=30, input_len=8)
    async with scripted(ScriptedBackend(say(), step_s=1.0)) as target:
        running = await prepare(target, load, scale=Scale())
        await running.run()

    sent = sorted(result.sent_s for result in running.results)
    assert sent == pytest.approx(arrivals(load), abs=0.01)
    # The schedule's own numbers, not a clock's.
    assert sorted(result.intended_s for result in running.results) == list(arrivals(load))


async def test_a_wait_for_a_slot_counts_as_latency(autojump_clock):
    load = Load(requests=3, concurrency=1, rate=1000.0, output_len=4, input_len=8)
    async with scripted(ScriptedBackend(say(), step_s=1.0)) as target:
        running = await prepare(target, load, scale=Scale())
        await running.run()

    last = max(running.results, key=lambda result: result.ended_s)
    assert last.sent_s - last.intended_s > 6
    assert last.ttft_s == pytest.approx(last.sent_s - last.intended_s + 1.0, abs=1.1)
    assert last.end_to_end_s > 11


async def test_a_client_that_is_late_counts_its_lateness(autojump_clock):
    late = []

    def dawdle(result):
        if not late:
            autojump_clock.jump(10.0)  # as if this process had not been scheduled
        late.append(result)

    load = Load(requests=3, concurrency=None, rate=1.0, output_len=1, input_len=8)
    async with scripted(ScriptedBackend(say("a"))) as target:
        running = await prepare(target, load, scale=Scale(), on_result=dawdle)
        await running.run()

    planned = arrivals(load)
    results = sorted(running.results, key=lambda result: result.number)
    assert [result.intended_s for result in results] == list(planned)
    assert results[1].ttft_s > 10 - planned[1] - 0.1
    assert figure(running.results).send_lag_s.max > 5


async def test_a_cancelled_run_has_all_results_so_far(autojump_clock):
    load = Load(requests=10, concurrency=2, output_len=5, input_len=8)
    async with scripted(ScriptedBackend(say(), step_s=1.0)) as target:
        running = await prepare(target, load, scale=Scale())
        with trio.move_on_after(8.5):
            await running.run()

    ends = [result.end for result in running.results]
    assert ends == [COMPLETED, COMPLETED, CANCELLED, CANCELLED]
    cut = running.results[-1]
    assert 0 < cut.tokens < 5
    assert cut.ended_s == pytest.approx(8.5, abs=0.01)


async def test_each_result_is_told_when_it_comes(autojump_clock):
    told = []
    async with scripted(ScriptedBackend(say("a"))) as target:
        load = Load(requests=3, input_len=8)
        running = await prepare(target, load, scale=Scale(), on_result=told.append)
        await running.run()

    assert told == running.results


@pytest.mark.parametrize(
    ("pieces", "end"),
    [
        ([LAST % b"stop", DONE], COMPLETED),
        ([LAST % b"stop"], UNMARKED),
        ([LAST % b"abort", DONE], "finish:abort"),
        ([LAST % b""], "truncated"),
        ([LAST % b"stop", httpx2.ReadError("reset")], "truncated"),
        ([b'data: {"error": {"message": "x", "code": "engine_error"}}\n\n'], "error:engine_error"),
        ([b'data: {"error": {"message": "x"}}\n\n'], "error:stream_error"),
    ],
)
async def test_every_way_to_end_has_its_class(pieces, end, autojump_clock):
    (result,) = await ask_once(PiecesTransport(pieces))

    assert result.end == end
    assert result.completed == (end in {COMPLETED, UNMARKED})


async def test_refused_unreachable_and_timed_out_requests_have_theirs(autojump_clock):
    (refused,) = await ask_once(PiecesTransport([b'{"error": {"code": "queue_full"}}'], status=429))
    (unreachable,) = await ask_once(PiecesTransport(error=httpx2.ConnectError("no")))
    (slow,) = await ask_once(PiecesTransport([LAST % b"", 60.0, DONE]), timeout_s=5.0)

    assert refused.end == "refused:429:queue_full"
    assert unreachable.end == "unreachable"
    assert "No answer" in unreachable.detail
    assert (slow.end, slow.ended_s) == ("timeout", pytest.approx(5.0, abs=0.01))
    assert slow.tokens == 1


async def test_one_write_of_several_events_counts_once(autojump_clock):
    (result,) = await ask_once(PiecesTransport([LAST % b"" * 3, 1.0, LAST % b"stop", DONE]))

    assert (len(result.arrivals_s), result.writes, result.output_tokens) == (4, 2, None)
    assert result.tokens == 4


async def test_an_engine_that_fails_leaves_classes_and_not_exceptions(autojump_clock):
    backend = ScriptedBackend(lambda _: Script(tuple(b"abc"), 255, fail_at=1), step_s=1.0)
    async with scripted(backend) as target:
        running = await prepare(target, Load(requests=2, input_len=8), scale=Scale())
        await running.run()

    assert [result.end for result in running.results] == ["error:engine_error"] * 2


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_prompts_get_the_length_that_was_asked_for(endpoint, autojump_clock):
    load = Load(requests=20, concurrency=4, input_len=100, output_len=1)
    async with scripted(ScriptedBackend(say("x"))) as target:
        running = await prepare(attrs.evolve(target, endpoint=endpoint), load)
        await running.run()

    # The scripted tokenizer has one token per byte, so words differ.
    assert figure(running.results).mean_prompt_tokens == pytest.approx(100, rel=0.05)


async def test_without_usage_a_word_is_taken_for_a_token(autojump_clock):
    async with connect("http://a", transport=PiecesTransport([LAST % b"stop"])) as client:
        assert await calibrate(Target(client, "m"), Load(requests=1)) == Scale()


@pytest.mark.parametrize(
    ("transport", "error"),
    [
        (PiecesTransport([LAST % b""]), StreamCutError),
        (PiecesTransport([b"{}"], 500), RefusedError),
    ],
)
async def test_a_server_that_fails_the_first_question_is_an_error(transport, error, autojump_clock):
    async with connect("http://a", transport=transport) as client:
        with pytest.raises(error):
            await prepare(Target(client, "m"), Load(requests=1))


async def test_a_calibration_asks_for_one_token_without_a_minimum(autojump_clock):
    transport = PiecesTransport([LAST % b"stop", DONE])
    async with connect("http://a", transport=transport) as client:
        fields = {"min_tokens": 64, "ignore_eos": True}
        await calibrate(Target(client, "m", fields=fields), Load(requests=1))

    body = await transport.requests[0].aread()
    assert b'"max_tokens":1,' in body
    assert b"min_tokens" not in body
    assert b'"ignore_eos":true' in body


def test_a_run_knows_nothing_before_it_began():
    assert Run(None, Load(requests=1), ["a"]).results == []
