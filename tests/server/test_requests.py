"""``POST /v1/requests/{id}/cancel``, and what it costs to cancel."""

from __future__ import annotations

import logging
import sys

import attrs
import pytest
import trio
from tests.server.reading import CHAT, STREAM, chunks, error, events, held, text
from trio.testing import wait_all_tasks_blocked

from triolet.config import Config
from triolet.core import CancelCause, EngineRequest, RequestId, SamplingParams
from triolet.runtime.lifecycle import TextOptions
from triolet.testing.asgi import open_server
from triolet.testing.engine import ScriptedBackend, say, serve_script

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = "ab " * 1000
# Headers, and so the id, come before the first token.
EARLY = Config(commit_after=0.5)


@pytest.fixture
def outcomes(caplog):
    """The ids and outcomes of the requests that ended, in order."""
    caplog.set_level(logging.INFO, logger="triolet.requests")

    def ended() -> list[tuple[str, str]]:
        lines = [record.args for record in caplog.records if record.name == "triolet.requests"]
        return [(args[0], args[1]) for args in lines]

    return ended


def served(**options):
    return serve_script(ScriptedBackend(say(LONG), **options))


async def started(server, path=CHATS, body=STREAM, headers=None):
    """A stream whose headers have come, and its id."""
    exchange = server.client.start("POST", path, json_body=body, headers=headers)
    message = await exchange.next_message()
    return exchange, dict(message["headers"])[b"x-request-id"].decode()


async def cancel(server, request_id, **options):
    return await server.client.request("POST", f"/v1/requests/{request_id}/cancel", **options)


def answer(request_id, outcome):
    status = outcome.partition(":")[0]
    return {"id": request_id, "object": "request", "status": status, "outcome": outcome}


async def metric(server, name):
    lines = (await server.client.request("GET", "/metrics")).body.decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHATS, STREAM), (COMPLETIONS, {"model": "scripted", "prompt": "hi", "stream": True})],
)
async def test_a_cancelled_stream_ends_with_an_error_and_never_done(
    autojump_clock, outcomes, path, body
):
    async with open_server(served(step_s=1.0)) as server:
        exchange, request_id = await started(server, path, {**body, "max_tokens": 100})
        await trio.sleep(5)
        response = await cancel(server, request_id)
        assert held(server) == (0, 0, 0)  # no step passes between
        cut = await exchange.read()
    assert response.status == 200
    assert response.json() == answer(request_id, "cancelled:client_cancel")
    assert events(cut.body)[-1]["error"]["code"] == "client_cancel"
    assert b"[DONE]" not in cut.body
    assert not cut.complete
    assert outcomes() == [(request_id, "cancelled:client_cancel")]


async def test_a_second_cancel_changes_nothing_and_is_counted(autojump_clock, outcomes):
    async with open_server(served(step_s=1.0)) as server:
        backend = server.runtime.backend()
        _, request_id = await started(server)
        responses = [await cancel(server, request_id) for _ in range(3)]
        assert backend.statistics().late_aborts == 0
        assert await metric(server, "triolet_late_cancels_total") == 2
    assert {response.status for response in responses} == {200}
    assert responses[0].body == responses[1].body == responses[2].body
    assert len(outcomes()) == 1


async def test_a_request_in_the_queue_is_gone_at_once(autojump_clock, outcomes):
    async with open_server(served(step_s=50.0, max_num_seqs=1), EARLY) as server:
        await started(server)
        queued, request_id = await started(server)
        before = trio.current_time()
        response = await cancel(server, request_id)
        assert trio.current_time() == before
        assert (server.runtime.live_requests, server.runtime.queued_requests) == (1, 1)
        assert server.runtime.backend().statistics().waiting == 1
        await queued.read()
    assert response.json() == answer(request_id, "cancelled:client_cancel")
    assert outcomes()[0] == (request_id, "cancelled:client_cancel")


async def test_all_prompts_and_choices_end(autojump_clock, outcomes):
    body = {"model": "scripted", "prompt": ["a", "b"], "n": 3, "stream": True, "max_tokens": 99}
    async with open_server(served(step_s=1.0)) as server:
        exchange, request_id = await started(server, COMPLETIONS, body)
        await trio.sleep(3)
        assert server.runtime.backend().statistics().used_rows == 6
        await cancel(server, request_id)
        assert held(server) == (0, 0, 0)
        await exchange.read()
    assert outcomes() == [(request_id, "cancelled:client_cancel")]


async def test_a_response_that_is_not_streamed_becomes_a_499(autojump_clock, outcomes):
    async with open_server(served(step_s=1.0)) as server:
        exchange = server.client.start("POST", CHATS, json_body=CHAT)
        await trio.sleep(3)
        (handle,) = server.runtime._handles.values()
        await cancel(server, handle.id)
        response = await exchange.read()
    assert (response.status, error(response)["code"]) == (499, "client_cancel")
    assert response.headers["x-request-id"] == handle.id


@pytest.mark.parametrize(
    ("how", "outcome"),
    [("end", "finished"), ("fail", "failed"), ("leave", "cancelled:disconnect")],
)
async def test_what_has_ended_says_how(autojump_clock, how, outcome):
    script = say("abc") if how == "end" else say(LONG)
    backend = ScriptedBackend(script, step_s=1.0, die_after_steps=3 if how == "fail" else None)
    async with open_server(serve_script(backend)) as server:
        exchange, request_id = await started(server)
        if how == "leave":
            exchange.disconnect()
            await wait_all_tasks_blocked()
        else:
            await exchange.read()
        response = await cancel(server, request_id)
        # Also when the server itself has stopped.
        assert response.json() == answer(request_id, outcome)
        assert response.status == 200


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
async def test_a_cancel_is_heard_while_the_server_drains(autojump_clock, path):
    body = {**STREAM, "prompt": "hi", "max_tokens": 99}
    async with open_server(served(step_s=1.0)) as server:
        exchange, request_id = await started(server, path, body)
        server.runtime.drain()
        assert (await cancel(server, request_id)).status == 200
        await server.runtime.wait_stopped()
        assert (await exchange.read()).complete is False


async def test_an_id_that_never_was_is_a_404(autojump_clock):
    async with open_server() as server:
        for request_id in ("chatcmpl-0", "0" * 32, "x" * 5000, "%00", "a b"):
            response = await cancel(server, request_id)
            assert (response.status, error(response)["code"]) == (404, "not_found")
            assert len(response.body) < 400
        assert await metric(server, "triolet_late_cancels_total") == 0


async def test_to_another_key_a_request_never_was(autojump_clock, outcomes):
    mine, yours = ({"authorization": f"Bearer {key}"} for key in ("my-key", "your-key"))
    async with open_server(served(step_s=1.0), Config(api_key=("my-key", "your-key"))) as server:
        exchange, request_id = await started(server, headers=mine)
        unknown = await cancel(server, "chatcmpl-0", headers=yours)
        foreign = await cancel(server, request_id, headers=yours)
        assert (foreign.status, unknown.status) == (404, 404)
        assert foreign.body.replace(request_id.encode(), b"chatcmpl-0") == unknown.body
        assert (await cancel(server, request_id)).status == 401
        assert outcomes() == []
        assert (await cancel(server, request_id, headers=mine)).status == 200
        # Its end is nobody else's business either.
        assert (await cancel(server, request_id, headers=yours)).status == 404
        await exchange.read()
    assert outcomes() == [(request_id, "cancelled:client_cancel")]


async def test_other_methods_are_not_allowed(autojump_clock):
    async with open_server() as server:
        response = await server.client.request("GET", "/v1/requests/chatcmpl-0/cancel")
    assert (response.status, response.headers["allow"]) == (405, "POST")
    assert error(response)["code"] == "method_not_allowed"


@pytest.mark.parametrize("body", [b"", b"{}", b"not JSON", b"x" * 1_000_000])
async def test_its_body_says_nothing(autojump_clock, body):
    async with open_server(served(step_s=1.0)) as server:
        exchange, request_id = await started(server)
        headers = {"content-type": "text/plain"}
        assert (await cancel(server, request_id, body=body, headers=headers)).status == 200
        await exchange.read()


async def test_a_body_that_never_ends_delays_the_answer_but_not_the_cancel(autojump_clock):
    async with open_server(served(step_s=1.0)) as server:
        exchange, request_id = await started(server)
        before = trio.current_time()
        path = f"/v1/requests/{request_id}/cancel"
        slow = server.client.start("POST", path, body=b"{", more_body=True)
        await exchange.read()
        assert trio.current_time() == before
        assert (await slow.read()).status == 200
        assert trio.current_time() - before == pytest.approx(5)


async def test_of_two_causes_the_first_is_told(autojump_clock, outcomes):
    async with open_server(served(step_s=1.0)) as server:
        _, request_id = await started(server)
        (handle,) = server.runtime._handles.values()
        assert handle.cancel(CancelCause.SLOW_CLIENT)
        assert not handle.cancel(CancelCause.DISCONNECT)
        response = await cancel(server, request_id)
    assert response.json()["outcome"] == "cancelled:slow_client"
    assert outcomes() == [(request_id, "cancelled:slow_client")]


@attrs.define(eq=False)
class Listening(ScriptedBackend):
    """Writes down which choices it is told to end, and does not."""

    told: list[tuple[RequestId, int]] = attrs.field(factory=list, init=False)
    aborted: list[RequestId] = attrs.field(factory=list, init=False)

    def end_choice(self, request_id, choice):
        self.told.append((request_id, choice))

    def abort(self, request_id):
        self.aborted.append(request_id)
        super().abort(request_id)


async def test_a_choice_that_a_stop_string_ends_is_ended_in_the_engine(autojump_clock):
    def scripts(request):
        return tuple(say(said)(request) for said in ("abc. and on", "xyz" * 9, "q. and on"))

    backend = Listening(scripts, step_s=1.0)
    async with open_server(serve_script(backend)) as server:
        body = {**STREAM, "n": 3, "stop": ".", "max_tokens": 20}
        exchange, request_id = await started(server, body=body)
        response = await exchange.read()
    said = [text([c for c in chunks(response) if c["choices"][0]["index"] == i]) for i in range(3)]
    assert said == ["abc", ("xyz" * 9)[:20], "q"]
    assert backend.told == [(request_id, 2), (request_id, 0)]


async def test_the_last_choice_of_a_prompt_is_aborted_with_it(autojump_clock):
    backend = Listening(say("ab. and on"), step_s=1.0)
    async with open_server(serve_script(backend)) as server:
        body = {**STREAM, "n": 2, "stop": "."}
        exchange, request_id = await started(server, body=body)
        assert chunks(await exchange.read())
        assert held(server) == (0, 0, 0)
    assert backend.told == [(request_id, 0)]
    assert backend.aborted == [request_id]


class CountedId(str):
    """An id that counts how often it is compared."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other):
        CountedId.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


async def operations(live: int, cancels: int) -> int:
    """Calls and comparisons of ids that so many cancels take among so many live requests."""
    counted = 0

    def count(_, event, __):
        nonlocal counted
        counted += event in {"call", "c_call"}

    async with open_server(served(step_s=1e6), Config(max_num_queued_reqs=live)) as server:
        handles = []
        for number in range(live):
            id_ = CountedId(f"r{number:06}")
            request = EngineRequest(RequestId(id_), (1,), SamplingParams(max_tokens=1))
            with server.runtime.arrive(RequestId(id_)) as arrival:
                handles.append(arrival.admit((request,), TextOptions(), timeout_s=1e9))
        await wait_all_tasks_blocked()
        CountedId.compared = 0
        try:
            sys.setprofile(count)
            for handle in handles[live // 2 :][:cancels]:
                handle.cancel(CancelCause.DISCONNECT)
            await wait_all_tasks_blocked()
        finally:
            sys.setprofile(None)
        assert server.runtime.live_requests == live - cancels
        return counted + CountedId.compared


@pytest.mark.slow
async def test_a_flood_of_cancels_costs_the_same_for_each_however_many_live(mock_clock):
    few = await operations(live=200, cancels=100)
    many = await operations(live=1000, cancels=100)
    assert many < few * 1.2
    flood = await operations(live=1000, cancels=400)
    assert flood < many * 4 * 1.2
