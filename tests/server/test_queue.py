"""Contract §8 and §10: who waits for the engine, for how long, and what it is told."""

from __future__ import annotations

import json
import logging
import math
from itertools import pairwise

import attrs
import pytest
import trio
from tests.server.reading import CHAT, STREAM, chunks, error, events, held, text
from trio.testing import wait_all_tasks_blocked

from triolet.config import Config
from triolet.core import CancelCause, RequestId
from triolet.output.events import Usage
from triolet.runtime.record import RequestRecord
from triolet.server.chat import ChatEndpoint
from triolet.testing.asgi import open_server
from triolet.testing.engine import ScriptedBackend, say, serve_script

PATH, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATIENCE = "x-stainless-read-timeout"
#: Prompt tokens of CHAT.
SIZE = 6


@pytest.fixture
def outcomes(caplog):
    """The outcomes of the requests that ended, in order."""
    caplog.set_level(logging.INFO, logger="triolet.requests")

    def ended() -> list[str]:
        return [record.args[1] for record in caplog.records if record.name == "triolet.requests"]

    return ended


def one_row(script=None, **options):
    return serve_script(ScriptedBackend(script or say("ab " * 1000), max_num_seqs=1, **options))


async def busy(server):
    """A stream that has the only row."""
    exchange = server.client.start("POST", PATH, json_body=STREAM)
    await exchange.next_body()
    return exchange


async def metrics(server):
    lines = (await server.client.request("GET", "/metrics")).body.decode().splitlines()
    found = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in found}


@pytest.mark.parametrize("stream", [True, False])
async def test_who_waits_too_long_is_told_so_and_costs_no_step(autojump_clock, outcomes, stream):
    config = Config(queue_timeout=7, commit_after=100)
    async with open_server(one_row(step_s=1.0), config) as server:
        first = await busy(server)
        before = trio.current_time()
        body = {**CHAT, "stream": stream}
        response = await server.client.request("POST", PATH, json_body=body)
        assert trio.current_time() - before == pytest.approx(7)
        statistics = server.runtime.backend().statistics()
        assert (statistics.waiting, statistics.prompt_tokens) == (0, SIZE)
        assert outcomes() == ["cancelled:timeout"]
        first.disconnect()
        await wait_all_tasks_blocked()
        assert held(server) == (0, 0, 0)
    assert (response.status, error(response)["code"]) == (504, "timeout")
    assert "in the queue" in error(response)["message"]
    assert response.headers["x-should-retry"] == "false"


async def test_who_hears_keepalives_meanwhile_gets_an_error_event(autojump_clock):
    config = Config(queue_timeout=7, commit_after=2, keepalive=2)
    async with open_server(one_row(step_s=1.0), config) as server:
        await busy(server)
        response = await server.client.request("POST", PATH, json_body=STREAM)
    assert response.status == 200
    assert response.body.count(b": keep-alive") == 2
    assert error(response)["code"] == "timeout"
    assert not response.complete


async def test_what_the_engine_has_begun_with_may_take_longer(autojump_clock, outcomes):
    config = Config(queue_timeout=3)
    async with open_server(one_row(say("a" * 50), step_s=1.0), config) as server:
        response = await server.client.request("POST", PATH, json_body=STREAM)
        assert trio.current_time() > 40
    assert text(chunks(response)) == "a" * 50
    assert outcomes() == ["finished"]


async def test_the_total_deadline_holds_in_the_queue_and_behind_it(autojump_clock, outcomes):
    config = Config(queue_timeout=7, commit_after=100)
    async with open_server(one_row(step_s=1.0), config) as server:
        before = trio.current_time()
        first = server.client.start("POST", PATH, json_body={**STREAM, "timeout": 20})
        await first.next_body()
        queued = await server.client.request("POST", PATH, json_body={**STREAM, "timeout": 4})
        assert trio.current_time() - before < 7
        assert "in the queue" in error(queued)["message"]
        running = await first.read()
        assert trio.current_time() - before == pytest.approx(20)
        assert "in the queue" not in error(running)["message"]
    assert outcomes() == ["cancelled:timeout"] * 2


async def test_without_a_queue_timeout_only_the_total_deadline_counts(autojump_clock):
    config = Config(queue_timeout=0, keepalive=0)
    async with open_server(one_row(say("ab " * 60), step_s=1.0), config) as server:
        first = await busy(server)
        server.client.nursery.start_soon(first.read)
        second = server.client.start("POST", PATH, json_body={**STREAM, "max_tokens": 2})
        assert text(chunks(await second.read())) == "ab"
        assert trio.current_time() > 180


@pytest.mark.parametrize("step_s", [6.999, 7.0, 7.001])
async def test_a_step_that_ends_with_the_wait_gives_one_end_or_the_other(
    autojump_clock, outcomes, step_s
):
    backend = ScriptedBackend(say("a"), step_s=step_s)
    async with open_server(serve_script(backend), Config(queue_timeout=7)) as server:
        await server.client.request("POST", PATH, json_body=CHAT)
        assert held(server) == (0, 0, 0)
    assert outcomes()[0] in {"finished", "cancelled:timeout"}
    if step_s < 7:
        assert outcomes() == ["finished"]
    if step_s > 7:
        assert outcomes() == ["cancelled:timeout"]


async def test_too_late_is_too_late_even_if_the_engine_says_so_in_the_same_moment(autojump_clock):
    async with open_server(one_row(step_s=1e6), Config(queue_timeout=7)) as server:
        server.client.start("POST", PATH, json_body=CHAT)
        await wait_all_tasks_blocked()
        (handle,) = server.runtime._handles.values()
        handle.scope.deadline = trio.current_time()
        handle.first_scheduled(1)
        await wait_all_tasks_blocked()
        assert handle.record.outcome == "cancelled:timeout"
        assert handle.record.first_scheduled_ns is None


async def test_a_queue_with_too_many_tokens_takes_no_more(autojump_clock, outcomes):
    config = Config(max_num_queued_tokens=2 * SIZE, queue_timeout=0)
    async with open_server(one_row(step_s=1.0), config) as server:
        await busy(server)
        waiting = [server.client.start("POST", PATH, json_body=STREAM) for _ in range(2)]
        await wait_all_tasks_blocked()
        found = await metrics(server)
        assert found["triolet_requests_queued"] == 2
        assert found["triolet_queued_prompt_tokens"] == 2 * SIZE
        assert found["triolet_requests_live"] == 3
        refused = await server.client.request("POST", PATH, json_body=STREAM)
        assert (refused.status, error(refused)["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        # Who gives up makes room at once.
        waiting[0].disconnect()
        await wait_all_tasks_blocked()
        server.client.start("POST", PATH, json_body=STREAM)
        await wait_all_tasks_blocked()
        assert server.runtime.queued_tokens == 2 * SIZE
    assert outcomes()[:2] == ["rejected", "cancelled:disconnect"]


async def test_a_prompt_of_any_size_is_taken_where_nothing_waits(autojump_clock):
    config = Config(max_num_queued_tokens=1)
    async with open_server(one_row(say("a"), step_s=1.0), config) as server:
        assert (await server.client.request("POST", PATH, json_body=CHAT)).status == 200
        assert (server.runtime.queued_requests, server.runtime.queued_tokens) == (0, 0)


async def test_retry_after_is_the_pace_at_which_the_queue_moves(autojump_clock):
    config = Config(max_num_queued_tokens=5 * SIZE, queue_timeout=0)
    # Each takes the row for 10 steps, of a second each.
    async with open_server(one_row(say("a" * 9), step_s=1.0), config) as server:
        served = [server.client.start("POST", PATH, json_body=CHAT) for _ in range(5)]
        for exchange in served[:4]:
            await exchange.read()
        for _ in range(4):
            server.client.start("POST", PATH, json_body=CHAT)
        await wait_all_tasks_blocked()
        refused = await server.client.request(
            "POST", COMPLETIONS, json_body={"model": "scripted", "prompt": ["hi"] * 4}
        )
        assert refused.status == 429
        tokens = server.runtime.queued_tokens + 4 * 3
        missing = tokens - 5 * SIZE
        assert missing > 0
        # Whose turn comes first among those that arrive at once is Trio's to choose, and with it
        # how many have begun by now: the first after one step, each further one 10 later.
        begun = 9 - server.runtime.queued_requests
        pace_s = (1 + 10 * (begun - 1)) / (begun * SIZE)
        assert int(refused.headers["retry-after"]) == math.ceil(missing * pace_s)


async def test_a_reader_that_lags_shows_as_paused(autojump_clock):
    async with open_server(one_row(), Config(max_stream_buffer=1000)) as server:
        lagging = server.client.start("POST", PATH, json_body=STREAM)
        await lagging.next_message()
        await wait_all_tasks_blocked()
        assert (await metrics(server))["triolet_requests_paused"] == 1
        lagging.disconnect()
        await wait_all_tasks_blocked()
        assert (await metrics(server))["triolet_requests_paused"] == 0


async def test_every_admitted_request_counts_its_wait_whatever_ends_it(autojump_clock):
    async with open_server(one_row(say("ab"), step_s=1.0), Config(queue_timeout=1)) as server:
        await server.client.request("POST", PATH, json_body=CHAT)
        waiting = [server.client.start("POST", PATH, json_body=CHAT) for _ in range(3)]
        for exchange in waiting:
            await exchange.read()
        await server.client.request("POST", PATH, json_body={})  # never admitted
        found = await metrics(server)
    assert found['triolet_requests_total{outcome="cancelled:timeout"}'] >= 2
    assert found["triolet_request_queue_seconds_count"] == 4


async def test_who_gave_up_in_the_queue_has_waited_until_then(autojump_clock):
    record = RequestRecord(
        RequestId("r"), "cancelled:timeout", Usage(1), received_ns=0, ended_ns=9 * 10**9
    )
    begun = attrs.evolve(record, admitted_ns=10**9, first_scheduled_ns=3 * 10**9)
    async with open_server() as server:
        for each in (record, begun, attrs.evolve(begun, first_scheduled_ns=None)):
            server.runtime.on_record(each)
        found = await metrics(server)
    assert found["triolet_request_queue_seconds_count"] == 2
    assert found["triolet_request_queue_seconds_sum"] == 2 + 8


# What the client's SDK says of its own patience.


async def test_a_client_that_waits_no_longer_is_not_computed_for(autojump_clock, outcomes):
    async with open_server(one_row(step_s=1.0)) as server:
        response = await server.client.request(
            "POST", PATH, json_body=CHAT, headers={PATIENCE: "5.0"}
        )
        assert trio.current_time() == pytest.approx(5)
        assert held(server) == (0, 0, 0)
    assert response.status == 504
    assert outcomes() == ["cancelled:timeout"]


async def test_a_stream_is_kept_alive_well_within_the_clients_patience(autojump_clock, outcomes):
    config = Config(queue_timeout=600)
    async with open_server(one_row(say("abc"), step_s=10.0), config) as server:
        exchange = server.client.start("POST", PATH, json_body=STREAM, headers={PATIENCE: "12"})
        heard, more = [trio.current_time()], True
        while more:
            message = await exchange.next_message()
            heard.append(trio.current_time())
            more = message.get("more_body", True)
    assert max(later - earlier for earlier, later in pairwise(heard)) <= 6
    assert heard[-1] >= 40
    assert outcomes() == ["finished"]


async def test_a_stream_is_kept_company_in_the_queue_for_as_long_as_it_takes(autojump_clock):
    backend = one_row(say("a" * 39), step_s=1.0)
    async with open_server(backend, Config(queue_timeout=60)) as server:
        first = await busy(server)
        server.client.nursery.start_soon(first.read)
        waiting = server.client.start("POST", PATH, json_body=STREAM, headers={PATIENCE: "5"})
        heard = [trio.current_time()]
        while heard[-1] < 39:
            assert (await waiting.next_message())["type"].startswith("http.response.")
            heard.append(trio.current_time())
        assert max(later - earlier for earlier, later in pairwise(heard)) <= 2.5
        rest = await waiting.read()
    assert heard[1] == heard[0] + 2.5
    assert rest.body.endswith(b"[DONE]\n\n")


async def test_a_stream_s_patience_does_not_make_the_queue_shorter(autojump_clock, outcomes):
    async with open_server(one_row(step_s=1.0), Config(queue_timeout=60)) as server:
        await busy(server)
        before = trio.current_time()
        response = await server.client.request(
            "POST", PATH, json_body=STREAM, headers={PATIENCE: "5"}
        )
        assert trio.current_time() - before == pytest.approx(60)
        assert outcomes() == ["cancelled:timeout"]
    assert response.status == 200
    assert "in the queue" in error(response)["message"]


# What the headers say holds before the body does.


async def test_an_upload_is_bounded_by_what_its_header_asks_for(autojump_clock, outcomes):
    async with open_server() as server:
        for header, seconds in (("3", 3), ("soon", 600), ("1e9", 600)):
            before = trio.current_time()
            exchange = server.client.start(
                "POST", PATH, more_body=True, headers={"X-Request-Timeout": header}
            )
            response = await exchange.read()
            assert (response.status, error(response)["code"]) == (504, "timeout")
            assert trio.current_time() - before == pytest.approx(seconds)
        assert held(server) == (0, 0, 0)
    assert outcomes() == ["cancelled:timeout"] * 3


@pytest.mark.parametrize(("header", "seconds"), [(PATIENCE, 7), ("X-Request-Timeout", 6)])
@pytest.mark.parametrize("stream", [True, False])
async def test_so_is_tokenizing_and_patience_begins_when_the_body_ends(
    autojump_clock, outcomes, monkeypatch, header, seconds, stream
):
    async def stuck(*_):
        await trio.sleep_forever()

    monkeypatch.setattr(ChatEndpoint, "prepare", stuck)
    async with open_server() as server:
        # Who sends does not listen yet.
        exchange = server.client.start("POST", PATH, more_body=True, headers={header: "6"})
        await trio.sleep(1)
        exchange.upload(json.dumps({**CHAT, "stream": stream}).encode())
        response = await exchange.read()
        assert (response.status, error(response)["code"]) == (504, "timeout")
        assert trio.current_time() == pytest.approx(seconds)
    assert outcomes() == ["cancelled:timeout"]


async def test_what_took_long_to_tokenize_is_heard_of_in_time_all_the_same(
    autojump_clock, monkeypatch
):
    prepare = ChatEndpoint.prepare

    async def slow(*args):
        await trio.sleep(2)
        return await prepare(*args)

    monkeypatch.setattr(ChatEndpoint, "prepare", slow)
    async with open_server(one_row(step_s=100.0)) as server:
        exchange = server.client.start("POST", PATH, json_body=STREAM, headers={PATIENCE: "6"})
        await exchange.next_message()
        assert trio.current_time() == 3
        whole = await server.client.request("POST", PATH, json_body=CHAT, headers={PATIENCE: "6"})
        assert whole.status == 504
        assert trio.current_time() == 3 + 6


# Who gets in where there is more than one key.


@pytest.mark.parametrize("more_body", [True, False])
async def test_one_key_s_flood_does_not_shut_another_out(autojump_clock, more_body):
    config = Config(api_key=("k1", "k2"), max_num_seqs=1, max_num_queued_reqs=15)
    async with open_server(one_row(step_s=1.0), config) as server:

        def start(key, **options):
            headers = {"authorization": f"Bearer {key}"}
            return server.client.start("POST", PATH, json_body=STREAM, headers=headers, **options)

        flood = [start("k1", more_body=more_body) for _ in range(20)]
        await wait_all_tasks_blocked()
        assert server.runtime.live_requests == 14
        assert (await start("k1").read()).status == 429
        mine = start("k2")
        await wait_all_tasks_blocked()
        assert server.runtime.live_requests == 15
        for exchange in flood:
            exchange.disconnect()
        await mine.next_body()
        mine.disconnect()
        await wait_all_tasks_blocked()
        assert held(server) == (0, 0, 0)


@pytest.mark.parametrize("keys", [(), ("k1",), ("k1", "k1")])
async def test_one_key_alone_has_all_places(autojump_clock, keys):
    config = Config(api_key=keys, max_num_seqs=1, max_num_queued_reqs=15)
    async with open_server(one_row(step_s=1.0), config) as server:
        headers = {"authorization": "Bearer k1"}
        for _ in range(20):
            server.client.start("POST", PATH, json_body=STREAM, headers=headers)
        await wait_all_tasks_blocked()
        assert server.runtime.live_requests == 16


async def test_a_batch_that_no_server_of_this_size_can_take_is_at_fault(autojump_clock):
    config = Config(api_key=("k1", "k2"), max_num_seqs=1, max_num_queued_reqs=15)
    headers = {"authorization": "Bearer k1"}
    async with open_server(config=config) as server:
        for prompts, status in ((15, 400), (14, 200)):
            response = await server.client.request(
                "POST",
                COMPLETIONS,
                json_body={"model": "scripted", "prompt": ["a"] * prompts, "max_tokens": 1},
                headers=headers,
            )
            assert response.status == status
            if status == 400:
                assert "takes 14 prompts" in error(response)["message"]


async def test_an_impatient_client_is_not_flooded(autojump_clock):
    # Two seconds in which there is nothing to show.
    async with open_server(one_row(say("a" * 40 + "b"), step_s=0.05)) as server:
        response = await server.client.request(
            "POST", PATH, json_body={**STREAM, "stop": "a" * 41}, headers={PATIENCE: "0.1"}
        )
    assert text(chunks(response)) == "a" * 40 + "b"
    assert response.body.count(b"keep-alive") in {3, 4}


async def test_never_is_never(autojump_clock):
    async with open_server(serve_script(ScriptedBackend(say("abc"), step_s=10.0))) as server:
        body = {**STREAM, "stream_options": {"keepalive": 0}}
        response = await server.client.request(
            "POST", PATH, json_body=body, headers={PATIENCE: "12"}
        )
    assert b"keep-alive" not in response.body
    assert events(response.body)[-1] == "[DONE]"


@pytest.mark.parametrize(
    "value", ["", "nan", "NaN", "inf", "-1", "0", "soon", "1e300", "12 s", "600000000", "\xbd"]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_patience_that_makes_no_sense_is_not_heeded(autojump_clock, value, stream):
    async with open_server(serve_script(ScriptedBackend(say("abc"), step_s=20.0))) as server:
        response = await server.client.request(
            "POST", PATH, json_body={**CHAT, "stream": stream}, headers={PATIENCE: value}
        )
    assert response.status == 200
    assert response.complete


# Who goes first.


@attrs.define(eq=False)
class Noting(ScriptedBackend):
    """Keeps what it is given."""

    submitted: list = attrs.field(factory=list, init=False)

    def submit(self, request):
        self.submitted.append(request)
        super().submit(request)


BODIES = [
    (PATH, CHAT),
    (COMPLETIONS, {"model": "scripted", "prompt": ["a", "b"]}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_priority_reaches_the_engine_where_it_is_heeded(autojump_clock, path, body):
    backend = Noting(say("a"))
    config = Config(scheduling_policy="priority")
    async with open_server(serve_script(backend), config) as server:
        for priority in (None, 0, -(2**31), 2**31 - 1):
            sent = {**body, "priority": priority}
            assert (await server.client.request("POST", path, json_body=sent)).status == 200
    prompts = len(body.get("prompt", "x"))
    found = [request.priority for request in backend.submitted[::prompts]]
    assert found == [0, 0, -(2**31), 2**31 - 1]
    assert len(backend.submitted) == 4 * prompts


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_priority_that_would_not_be_heeded_is_refused(autojump_clock, path, body):
    async with open_server() as server:
        plain = await server.client.request("POST", path, json_body={**body, "priority": 0})
        assert plain.status == 200
        refused = await server.client.request("POST", path, json_body={**body, "priority": 1})
    assert (refused.status, error(refused)["param"]) == (400, "priority")
    assert "--scheduling-policy priority" in error(refused)["message"]


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 1.0, True, "1"])
async def test_a_priority_is_an_integer_of_32_bits(autojump_clock, value):
    async with open_server(config=Config(scheduling_policy="priority")) as server:
        refused = await server.client.request("POST", PATH, json_body={**CHAT, "priority": value})
    assert (refused.status, error(refused)["param"]) == (400, "priority")


async def test_each_key_is_a_tenant_of_its_own_to_the_engine(autojump_clock):
    backend = Noting(say("a"))
    async with open_server(serve_script(backend), Config(api_key=("k1", "k2"))) as server:
        for key in ("k1", "k2", "k1"):
            for path, body in BODIES:
                headers = {"authorization": f"Bearer {key}"}
                await server.client.request("POST", path, json_body=body, headers=headers)
    tenants = [request.tenant for request in backend.submitted]
    # The beginning of SHA-256 of "k1".
    assert tenants[:3] == tenants[6:] == ["6ab9f1eb8f7d3388"] * 3
    assert tenants[3:6] == [tenants[3]] * 3
    assert tenants[3] != tenants[0]


async def test_without_keys_all_are_one_tenant(autojump_clock):
    backend = Noting(say("a"))
    async with open_server(serve_script(backend)) as server:
        headers = {"authorization": "Bearer whatever"}
        await server.client.request("POST", PATH, json_body=CHAT, headers=headers)
    assert [request.tenant for request in backend.submitted] == [""]


# What is counted.


async def test_whatever_is_refused_counts_once_as_rejected(autojump_clock):
    config = Config(api_key=("key",), max_body_size=1000)
    headers = {"authorization": "Bearer key"}
    refused = [
        ("POST", PATH, b"{}", headers, 400),
        ("POST", PATH, b"{}", {}, 401),
        ("POST", "/v1/nothing", b"{}", headers, 404),
        (
            "POST",
            PATH,
            b'{"model": "x", "messages": [{"role": "user", "content": ""}]}',
            headers,
            404,
        ),
        ("GET", PATH, b"", headers, 405),
        ("POST", PATH, b"x" * 2000, headers, 413),
        ("POST", "/tokenize", b"x" * 2000, headers, 413),
        ("POST", PATH, b"{}", {**headers, "content-type": "text/plain"}, 415),
        ("POST", "/v1/requests/x/cancel", b"", headers, 404),
    ]
    async with open_server(config=config) as server:
        for count, (method, path, body, sent, status) in enumerate(refused, 1):
            response = await server.client.request(method, path, body=body, headers=sent)
            assert response.status == status
            assert (await metrics(server))['triolet_requests_total{outcome="rejected"}'] == count


@pytest.mark.parametrize(("path", "prefix"), [(PATH, "chatcmpl-"), (COMPLETIONS, "cmpl-")])
async def test_a_refused_request_has_one_id_and_it_is_like_the_others(
    autojump_clock, caplog, path, prefix
):
    caplog.set_level(logging.INFO, logger="triolet.requests")
    async with open_server() as server:
        response = await server.client.request("POST", path, json_body={})
    assert response.status == 400
    (record,) = (r for r in caplog.records if r.name == "triolet.requests")
    assert response.headers["x-request-id"] == record.args[0]
    assert record.args[0].startswith(prefix)
    assert len(record.args[0]) == len(prefix) + 32


async def test_a_cause_that_comes_second_neither_pauses_nor_resumes(autojump_clock):
    async with open_server(one_row(), Config(max_stream_buffer=1000)) as server:
        lagging = server.client.start("POST", PATH, json_body=STREAM)
        await lagging.next_message()
        await wait_all_tasks_blocked()
        (handle,) = server.runtime._handles.values()
        handle.cancel(CancelCause.SLOW_CLIENT)
        handle._hub.log.take()
        handle.delivered(10**6)
        assert handle.state == "paused"
        await wait_all_tasks_blocked()
        assert handle.state == "cancelled"
