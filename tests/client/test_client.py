"""The client against the whole server on the scripted engine, and against ruder ones."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import httpx2
import pytest
import trio
from tests.client.transports import AsgiTransport, PiecesTransport

from triolet.client import (
    Ending,
    RefusedError,
    StreamCutError,
    StreamFailedError,
    UnreachableError,
    connect,
)
from triolet.client.client import MAX_REFUSAL_BYTES, api_root
from triolet.testing.asgi import open_server
from triolet.testing.engine import Script, ScriptedBackend, say, serve_script

CHUNK = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def talking(backend=None, **options):
    async with open_server(serve_script(backend)) as server:
        transport = AsgiTransport(server.client)
        async with connect("http://triolet", transport=transport, **options) as client:
            yield client, server


@asynccontextmanager
async def answered(transport):
    async with (
        connect("http://any", transport=transport) as client,
        client.chat("hi", model="m") as stream,
    ):
        yield stream


async def read_into(texts, stream):
    async for event in stream:
        texts.append(event.text)


async def test_a_chat_is_streamed_with_text_finish_usage_and_times(autojump_clock):
    backend = ScriptedBackend(say("Hello."), step_s=1.0)
    async with talking(backend) as (client, _), client.chat("hi", model="scripted") as stream:
        events = [event async for event in stream]

    assert "".join(event.text for event in events) == "Hello."
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    texts = [event for event in events if event.visible]
    since = [event.at.trio_s - stream.started.trio_s for event in texts]
    assert since == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], abs=0.01)
    assert texts[0].at.monotonic_ns <= texts[-1].at.monotonic_ns
    assert events[-1].usage == stream.usage
    assert [event.finish_reason for event in events if event.finish_reason] == ["stop"]
    assert stream.usage.completion_tokens == 7
    assert stream.finish_reasons == {0: "stop"}
    assert stream.outcome.ending is Ending.DONE
    assert stream.request_id.startswith("chatcmpl-")
    assert stream.bytes_read > 100
    assert stream.answered.trio_s <= texts[0].at.trio_s <= stream.ended.trio_s


async def test_a_completion_is_streamed_from_text_and_from_ids(autojump_clock):
    async with talking(ScriptedBackend(say("Yes."))) as (client, _):
        for prompt in ("Is it?", [72, 105]):
            async with client.completion(prompt, model="scripted", max_tokens=3) as stream:
                assert await stream.text() == "Yes"
            assert stream.finish_reasons == {0: "length"}
            assert stream.usage.completion_tokens == 3


async def test_the_models_are_listed(autojump_clock):
    async with talking() as (client, _):
        assert await client.models() == ("scripted",)


async def test_a_refusal_is_an_error_with_status_code_and_param(autojump_clock):
    async with talking() as (client, _):
        with pytest.raises(RefusedError) as caught:
            async with client.chat("hi", model="scripted", temperature=-1):
                pass

    error = caught.value
    assert (error.status, error.code, error.param) == (400, "invalid_request", "temperature")
    assert error.request_id


async def test_a_failing_engine_is_an_error_after_the_text_before_it(autojump_clock):
    backend = ScriptedBackend(lambda _: Script(tuple(b"abc"), 255, fail_at=2), step_s=1.0)
    texts = []
    async with talking(backend) as (client, _), client.chat("hi", model="scripted") as stream:
        with pytest.raises(StreamFailedError) as caught:
            await read_into(texts, stream)

    assert "".join(texts) == "ab"
    assert (caught.value.code, stream.outcome.ending) == ("engine_error", Ending.ERROR)


async def test_leaving_the_block_ends_the_request(autojump_clock):
    async with talking(ScriptedBackend(say(times=40), step_s=1.0)) as (client, server):
        async with client.chat("hi", model="scripted") as stream:
            async for event in stream:
                if event.number == 3:
                    break
        await trio.sleep(3)

        assert stream.outcome is None
        assert server.runtime.live_requests == 0


async def test_a_cancelled_scope_ends_the_request(autojump_clock):
    async with talking(ScriptedBackend(say(times=40), step_s=1.0)) as (client, server):
        with trio.move_on_after(4.5) as scope:
            async with client.chat("hi", model="scripted") as stream:
                await stream.text()
        await trio.sleep(3)

        assert scope.cancelled_caught
        assert stream.outcome is None
        assert server.runtime.live_requests == 0


async def test_what_is_sent_is_what_was_asked(autojump_clock):
    transport = PiecesTransport([CHUNK, DONE])
    mine = {"api_key": "k", "headers": {"X-A": "1"}, "transport": transport}
    async with (
        connect("http://any/v1/", **mine) as client,
        client.chat(
            [{"role": "user", "content": "é"}],
            model="m",
            stream_options={"continuous_usage_stats": True},
            headers={"X-B": "2"},
            max_tokens=3,
        ) as stream,
    ):
        assert await stream.text() == "a"

    (request,) = transport.requests
    assert str(request.url) == "http://any/v1/chat/completions"
    assert json.loads(await request.aread()) == {
        "model": "m",
        "messages": [{"role": "user", "content": "é"}],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    headers = request.headers
    assert (headers["authorization"], headers["x-a"], headers["x-b"]) == ("Bearer k", "1", "2")
    assert headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([CHUNK], "without [DONE]"),
        ([CHUNK, CHUNK[:20]], "inside an event"),
        ([CHUNK, httpx2.RemoteProtocolError("incomplete chunked read")], "incomplete chunked"),
        ([CHUNK, httpx2.ReadError("")], "ReadError"),
    ],
)
async def test_an_end_with_neither_is_truncated(pieces, says, autojump_clock):
    texts = []
    async with answered(PiecesTransport(pieces)) as stream:
        with pytest.raises(StreamCutError, match="The stream was cut: ") as caught:
            await read_into(texts, stream)

    assert texts == ["a"]
    assert says in caught.value.message
    assert stream.outcome.ending is Ending.TRUNCATED


async def test_several_events_of_one_read_have_one_time(autojump_clock):
    async with answered(PiecesTransport([CHUNK * 2, 5.0, CHUNK + DONE])) as stream:
        events = [event async for event in stream]

    assert [event.read for event in events] == [1, 1, 2]
    assert stream.reads == 2
    assert events[0].at == events[1].at
    assert events[2].at.trio_s - events[1].at.trio_s == pytest.approx(5.0, abs=0.01)


async def test_comments_and_events_without_json_are_counted(autojump_clock):
    async with answered(PiecesTransport([b": keep-alive\n", b"data: hm\n\n", DONE])) as stream:
        (event,) = [event async for event in stream]

    assert (stream.comments, stream.unreadable) == (1, 1)
    assert (event.raw.data, event.data, event.finish_reason) == ("hm", {}, None)


async def test_after_done_the_rest_is_awaited_but_not_for_ever(autojump_clock):
    closed_late = PiecesTransport([CHUNK, DONE, 3600.0])
    began = trio.current_time()
    async with answered(closed_late) as stream:
        assert await stream.text() == "a"

    assert trio.current_time() - began < 1
    assert closed_late.closed


async def test_reading_on_after_the_end_says_it_again(autojump_clock):
    async with answered(PiecesTransport([CHUNK])) as stream:
        for _ in range(2):
            with pytest.raises(StreamCutError):
                await stream.text()


async def test_no_answer_is_unreachable(autojump_clock):
    transport = PiecesTransport(error=httpx2.ConnectError("connection refused"))
    async with connect("http://any", transport=transport) as client:
        with pytest.raises(UnreachableError, match=r"No answer from http://any/v1: connection"):
            async with client.chat("hi", model="m"):
                pass
        with pytest.raises(UnreachableError):
            await client.models()


@pytest.mark.parametrize(
    ("status", "kind", "body", "says"),
    [
        (200, "application/json", b'{"choices": [{"message": {}}]}', "status 200"),
        (200, "text/html; charset=utf-8", b"<html>", "<html>"),
        (200, "application/json", b'{"error": {"message": "Busy."}}', "Busy."),
        (502, "text/plain", b"Bad Gateway", "Bad Gateway"),
    ],
)
async def test_an_answer_that_is_no_stream_is_refused(status, kind, body, says, autojump_clock):
    transport = PiecesTransport([body], status, {"content-type": kind})
    with pytest.raises(RefusedError) as caught:
        async with answered(transport):
            pass

    assert says in caught.value.message
    assert caught.value.status == status
    assert transport.closed


async def test_an_endless_refusal_is_not_read_to_its_end(autojump_clock):
    pieces = [b"x" * MAX_REFUSAL_BYTES, b"x" * MAX_REFUSAL_BYTES]
    with pytest.raises(RefusedError):
        async with answered(PiecesTransport(pieces, 500)):
            pass


@pytest.mark.parametrize(
    ("status", "body"), [(200, b"[]"), (200, b'{"data": 1}'), (200, b"junk"), (401, b"{}")]
)
async def test_a_list_of_models_that_is_none_is_refused(status, body, autojump_clock):
    async with connect("http://any", transport=PiecesTransport([body], status)) as client:
        with pytest.raises(RefusedError) as caught:
            await client.models()

    assert caught.value.status == status


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("https://h/v1", "https://h/v1"),
        ("http://h/prefix/v1/", "http://h/prefix/v1"),
    ],
)
def test_a_url_is_taken_with_and_without_v1(url, root):
    assert api_root(url) == root


@pytest.mark.parametrize("url", ["", "h:1", "ftp://h", "http://", "http://h?x=1", "http://h:x"])
def test_what_is_no_url_of_a_server_is_said(url):
    with pytest.raises(ValueError, match="is no URL"):
        api_root(url)
