"""The routes that tell about the server, at every point of its life."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from tests.server.reading import CHAT, STREAM, error

from triolet import __version__
from triolet.config import Config
from triolet.errors import ModelLoadError
from triolet.prompt.bytelevel import ByteTokenizer
from triolet.runtime.lifecycle import Runtime
from triolet.server.app import create_app
from triolet.testing.asgi import AsgiClient, open_server
from triolet.testing.engine import ScriptedBackend, say, serve_script

GENERATE = ["/v1/chat/completions", "/v1/completions"]


@asynccontextmanager
async def open_loading(loaded, *, result=None, failure=None):
    """A server whose model is loaded once ``loaded`` is set."""

    async def load():
        await loaded.wait()
        if failure is not None:
            raise failure
        return result

    runtime = Runtime(
        load,
        max_live_requests=4,
        max_undelivered_bytes=4096,
        max_request_timeout_s=600,
        drain_timeout_s=30,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.run)
        yield runtime, AsgiClient(create_app(runtime, Config()), nursery)
        runtime.drain()
        runtime.drain()
        await runtime.wait_stopped()
        nursery.cancel_scope.cancel("the test is over")


def numbers(response):
    """Samples of a scrape by name, labels left out where there are none."""
    families = text_string_to_metric_families(response.body.decode())
    return {
        (sample.name, *sample.labels.values()) if sample.labels else sample.name: sample.value
        for family in families
        for sample in family.samples
    }


async def get(client, path):
    return await client.request("GET", path)


async def test_a_loading_server_is_healthy_but_not_ready(autojump_clock):
    loaded = trio.Event()
    async with open_loading(loaded, result=serve_script()) as (runtime, client):
        health, ready = await get(client, "/health"), await get(client, "/ready")
        scrape, version = await get(client, "/metrics"), await get(client, "/version")
        models, model = await get(client, "/v1/models"), await get(client, "/v1/models/scripted")
        refused = [await client.request("POST", path, body=b"not even JSON") for path in GENERATE]
        loaded.set()
        await runtime.wait_started()
        assert (await get(client, "/ready")).status == 200
        assert (await client.request("POST", GENERATE[0], json_body=CHAT)).status == 200
    assert (health.status, health.json()) == (200, {"status": "ok", "phase": "starting"})
    for response in (ready, *refused):
        assert (response.status, error(response)["code"]) == (503, "not_ready")
        assert error(response)["type"] == "service_unavailable_error"
        assert response.headers["retry-after"] == "5"
    assert numbers(scrape)["triolet_ready"] == 0
    assert version.json() == {"version": __version__}
    assert models.json() == {"object": "list", "data": []}
    assert (model.status, error(model)["code"]) == (404, "model_not_found")


async def test_a_server_that_could_not_load_is_down(autojump_clock):
    loaded = trio.Event()
    failure = ModelLoadError("no such model")
    async with open_loading(loaded, failure=failure) as (runtime, client):
        loaded.set()
        await runtime.wait_stopped()
        responses = [await get(client, "/health"), await get(client, "/ready")]
        responses.append(await client.request("POST", GENERATE[0], json_body=CHAT))
    for response in responses[1:]:
        assert response.headers["retry-after"] == "5"
    for response in responses:
        assert (response.status, error(response)["code"]) == (503, "engine_down")
        assert "no such model" not in response.body.decode()


async def test_a_ready_server(autojump_clock):
    async with open_server() as server:
        health, ready = await get(server.client, "/health"), await get(server.client, "/ready")
    assert (health.status, health.json()) == (200, {"status": "ok", "phase": "ready"})
    assert (ready.status, ready.json()) == (200, {"status": "ready"})


async def test_a_draining_server_is_healthy_but_not_ready(autojump_clock):
    backend = ScriptedBackend(say("abcdef"), step_s=1.0)
    async with open_server(serve_script(backend), Config(drain_timeout=20)) as server:
        exchange = server.client.start("POST", GENERATE[0], json_body=STREAM)
        await exchange.next_body()
        server.runtime.drain()
        health, ready = await get(server.client, "/health"), await get(server.client, "/ready")
        scrape, models = (
            await get(server.client, "/metrics"),
            await get(server.client, "/v1/models"),
        )
        version = await get(server.client, "/version")
        exchange.disconnect()
        await server.runtime.wait_stopped()
    assert (health.status, health.json()) == (200, {"status": "ok", "phase": "draining"})
    assert (ready.status, error(ready)["code"]) == (503, "draining")
    assert ready.headers["retry-after"] == "5"
    assert (numbers(scrape)["triolet_ready"], numbers(scrape)["triolet_requests_live"]) == (0, 1)
    assert len(models.json()["data"]) == 1
    assert version.status == 200


async def test_a_scrape_shows_what_the_engine_holds_and_what_has_ended(mock_clock):
    backend = ScriptedBackend(say("ab"), step_s=1.0)
    async with open_server(serve_script(backend)) as server:
        exchange = server.client.start("POST", GENERATE[0], json_body=CHAT)
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(1.0)
        await trio.testing.wait_all_tasks_blocked()
        during = numbers(await get(server.client, "/metrics"))
        mock_clock.autojump_threshold = 0
        await exchange.read()
        response = await get(server.client, "/metrics")
        after = numbers(response)
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert during["triolet_requests_live"] == during["triolet_engine_sequences_running"] == 1
    assert during["triolet_engine_kv_blocks_used"] == during["triolet_engine_batch_rows_used"] == 1
    for gauge in (
        "triolet_requests_live",
        "triolet_engine_sequences_running",
        "triolet_engine_kv_blocks_used",
        "triolet_engine_batch_rows_used",
    ):
        assert after[gauge] == 0
    assert after["triolet_requests_total", "finished"] == 1
    assert after["triolet_prompt_tokens_total"] == 6
    assert after["triolet_output_tokens_total"] == 3
    assert after["triolet_engine_steps_total"] == 3


async def test_every_served_name_is_a_model(autojump_clock):
    names = ("org/tiny", "tiny")
    async with open_server(serve_script(names=names)) as server:
        listed = (await get(server.client, "/v1/models")).json()
        single = [(await get(server.client, f"/v1/models/{name}")).json() for name in names]
        answers = [
            await server.client.request("POST", GENERATE[0], json_body={**CHAT, "model": name})
            for name in names
        ]
        unknown = await get(server.client, "/v1/models/huge")
    assert listed == {"object": "list", "data": single}
    assert single[0] == {
        "id": "org/tiny",
        "object": "model",
        "created": 0,
        "owned_by": "triolet",
        "max_model_len": 4096,
    }
    assert [answer.status for answer in answers] == [200, 200]
    assert unknown.status == 404
    assert error(unknown) == {
        "message": "The model 'huge' is not served here.",
        "type": "not_found_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/health", None, 200),
        ("GET", "/metrics", None, 200),
        ("GET", "/nowhere", None, 404),
        ("POST", "/health", {}, 405),
        ("POST", "/v1/completions", {"model": "scripted", "prompt": "x"}, 200),
        ("POST", "/v1/completions", {"model": "scripted", "prompt": "x", "stream": True}, 200),
        ("POST", "/v1/completions", {}, 400),
    ],
)
async def test_every_response_has_an_id_of_its_own(autojump_clock, method, path, body, status):
    async with open_server(serve_script(ScriptedBackend(say("a")))) as server:
        responses = [await server.client.request(method, path, json_body=body) for _ in range(2)]
    assert [response.status for response in responses] == [status, status]
    ids = {response.headers["x-request-id"].rpartition("-")[2] for response in responses}
    assert len(ids) == 2
    assert {len(bytes.fromhex(id_)) for id_ in ids} == {16}


class BrokenTokenizer(ByteTokenizer):
    def encode(self, *_, **__):
        raise ZeroDivisionError("a secret")


async def test_a_bug_is_a_500_that_shows_nothing_and_has_an_id(autojump_clock):
    served = attrs.evolve(serve_script(), tokenizer=BrokenTokenizer())
    async with open_server(served) as server:
        # Starlette raises it again, so that the server logs it.
        with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
            async with trio.open_nursery() as nursery:
                client = AsgiClient(server.client.app, nursery)
                exchange = client.start("POST", GENERATE[0], json_body=CHAT)
                start, body = await exchange.next_message(), await exchange.next_body()
        assert server.runtime.live_requests == 0
    assert start["status"] == 500
    (request_id,) = (value for name, value in start["headers"] if name == b"x-request-id")
    assert request_id.startswith(b"chatcmpl-")
    assert json.loads(body)["error"] == {
        "message": "The server made a mistake; this has been logged.",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }


async def test_a_prefix_is_served_with_and_without(autojump_clock):
    async with open_server(config=Config(root_path="/llm")) as server:
        for path in ("/health", "/llm/health", "/llm/v1/models", "/v1/models"):
            assert (await get(server.client, path)).status == 200
        assert (await get(server.client, "/llmhealth")).status == 404
        answer = await server.client.request("POST", "/llm" + GENERATE[0], json_body=CHAT)
    assert answer.status == 200
