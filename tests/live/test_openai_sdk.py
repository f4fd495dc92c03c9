"""The unmodified OpenAI SDK against a server on a real port."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import openai
import pytest
import trio
from tests.live.processes import SCRIPTED, running

pytestmark = [pytest.mark.live, pytest.mark.slow]

KEY = "a-key"
CHAT = [{"role": "user", "content": "Say ab."}]
SAID = "ab 👋 " * 4
USAGE = {"stream_options": {"include_usage": True}}
PARIS = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("sdk") / "log"
    flags = ("--api-key", KEY, "--scripted-text", SAID, "--scripted-step-ms", "5")
    with running(log, (*SCRIPTED, *flags)) as process:
        process.wait_listening()
        process.wait_ready()
        yield process
    assert "Traceback" not in process.log()


def options(server, key=KEY):
    return {"base_url": f"{server.url}/v1", "api_key": key, "max_retries": 0}


@contextmanager
def synchronous(server, key=KEY):
    with openai.OpenAI(**options(server, key)) as client:
        yield client


def text_of(chunks):
    """The text of chat chunks or of completion chunks."""
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return "".join(
        (one.delta.content or "") if hasattr(one, "delta") else one.text for one in choices
    )


def in_a_thread(work):
    """A test that runs in a worker thread, as the synchronous SDK does under Trio."""

    async def test(server):
        with trio.fail_after(60):
            await trio.to_thread.run_sync(work, server)

    return test


@in_a_thread
def test_sync_chat(server):
    with synchronous(server) as client:
        whole = client.chat.completions.create(model="scripted", messages=CHAT)
    assert whole.choices[0].message.content == SAID
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == len(SAID.encode()) + 1


@in_a_thread
def test_sync_chat_stream(server):
    with (
        synchronous(server) as client,
        client.chat.completions.create(
            model="scripted", messages=CHAT, stream=True, **USAGE
        ) as stream,
    ):
        chunks = list(stream)
    assert text_of(chunks) == SAID
    assert chunks[-1].usage.completion_tokens == len(SAID.encode()) + 1
    assert [choice.finish_reason for choice in chunks[-2].choices] == ["stop"]


@in_a_thread
def test_sync_completions(server):
    with synchronous(server) as client:
        ask = {"model": "scripted", "prompt": "hi", "max_tokens": 7}
        whole = client.completions.create(**ask)
        with client.completions.create(**ask, stream=True) as stream:
            streamed = text_of(stream)
    assert whole.choices[0].text == streamed == "ab 👋"
    assert whole.choices[0].finish_reason == "length"


@in_a_thread
def test_the_stream_helper(server):
    with (
        synchronous(server) as client,
        client.chat.completions.stream(model="scripted", messages=CHAT) as stream,
    ):
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == SAID


@in_a_thread
def test_the_stream_helper_with_choices_and_logprobs(server):
    ask = {"model": "scripted", "messages": CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}
    with synchronous(server) as client:
        whole = client.chat.completions.create(**ask)
        with client.chat.completions.stream(**ask) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
    assert {"content.delta", "logprobs.content.delta", "logprobs.content.done"} <= kinds
    for streamed, said in zip(final.choices, whole.choices, strict=True):
        assert streamed.message.content == said.message.content == SAID
        assert streamed.logprobs.content == said.logprobs.content
        spelled = bytes(b for token in said.logprobs.content for b in token.bytes or ())
        assert spelled.decode() == SAID
        assert {len(token.top_logprobs) for token in said.logprobs.content} == {2}
    assert whole.usage.completion_tokens == 2 * (len(SAID.encode()) + 1)


@in_a_thread
def test_several_prompts_with_echo_and_logprobs(server):
    ask = {"model": "scripted", "prompt": ["hi", "you"], "n": 2, "max_tokens": 2, "logprobs": 1}
    with synchronous(server) as client:
        whole = client.completions.create(**ask, echo=True)
        with client.completions.create(**ask, echo=True, stream=True) as stream:
            pieces = [choice for chunk in stream for choice in chunk.choices]
    assert [choice.text for choice in whole.choices] == ["hiab", "hiab", "youab", "youab"]
    for choice in whole.choices:
        own = [piece for piece in pieces if piece.index == choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        tokens = [token for piece in own if piece.logprobs for token in piece.logprobs.tokens]
        assert tokens == choice.logprobs.tokens
        assert choice.logprobs.token_logprobs[0] is None


@in_a_thread
def test_raw_responses_show_the_request_id(server):
    with synchronous(server) as client:
        raw = client.chat.completions.with_raw_response.create(model="scripted", messages=CHAT)
        whole = raw.parse()
        models = client.models.list()
        model = client.models.retrieve("scripted")
    assert raw.status_code == 200
    assert raw.headers["x-request-id"] == whole.id == whole._request_id
    assert [model.id for model in models.data] == [model.id] == ["scripted"]


@in_a_thread
def test_errors_become_the_exceptions_of_the_sdk(server):
    with synchronous(server) as client:
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as bad:
            create(model="scripted", messages=CHAT, temperature=3)
        with pytest.raises(openai.BadRequestError) as role:
            create(model="scripted", messages=[*CHAT, {"role": "wizard", "content": ""}])
        with pytest.raises(openai.NotFoundError) as unknown:
            create(model="gpt-4", messages=CHAT)
    with (
        synchronous(server, "another-key") as client,
        pytest.raises(openai.AuthenticationError) as wrong_key,
    ):
        client.chat.completions.create(model="scripted", messages=CHAT)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_request")
    assert role.value.param == "messages[1].role"
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    assert wrong_key.value.code == "invalid_api_key"
    assert wrong_key.value.request_id


# The SDK stops at [DONE] and leaves its own generators to the garbage collector.
@pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")
async def test_async_chat_and_completions(server):
    with trio.fail_after(60):
        async with openai.AsyncOpenAI(**options(server)) as client:
            whole = await client.chat.completions.create(model="scripted", messages=CHAT)
            stream = await client.chat.completions.create(
                model="scripted", messages=CHAT, stream=True
            )
            streamed = text_of([chunk async for chunk in stream])
            text = await client.completions.create(model="scripted", prompt="x", max_tokens=2)
            stream = await client.completions.create(
                model="scripted", prompt="x", max_tokens=2, stream=True
            )
            streamed_text = text_of([chunk async for chunk in stream])
            with pytest.raises(openai.BadRequestError) as bad:
                await client.completions.create(model="scripted", prompt="x", max_tokens=0)
        gc.collect()
    assert whole.choices[0].message.content == streamed == SAID
    assert text.choices[0].text == streamed_text == "ab"
    assert bad.value.param == "max_tokens"


@pytest.fixture
def slow_server(start_scripted):
    """Takes one request at a time, and 40 seconds for it."""
    return start_scripted(
        "--max-num-seqs", "1", "--max-num-queued-reqs", "0",
        "--scripted-text", "ab " * 2000, "--scripted-step-ms", "10",
    )  # fmt: skip


def test_a_full_server_is_a_rate_limit_and_leaving_a_stream_ends_it(slow_server):
    ask = {"model": "scripted", "messages": CHAT, "stream": True}
    with synchronous(slow_server) as client:
        with client.chat.completions.create(**ask) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as full:
                client.chat.completions.create(**ask)
        slow_server.wait_free()
    assert full.value.code == "queue_full"
    assert int(full.value.response.headers["retry-after"]) >= 1
    assert slow_server.numbers()["cancelled:disconnect"] == 1


def test_an_error_in_the_middle_of_a_stream_raises(slow_server):
    # Two seconds are time enough for the first token, also on a busy machine.
    ask = {"model": "scripted", "messages": CHAT, "stream": True, "extra_body": {"timeout": 2}}
    received = []
    with (
        synchronous(slow_server) as client,
        client.chat.completions.create(**ask) as stream,
        pytest.raises(openai.APIError, match="deadline") as cut,
    ):
        received.extend(stream)
    assert cut.value.code == "timeout"
    assert text_of(received).startswith("ab")


@pytest.mark.model
def test_the_real_model_knows_the_capital_of_france(model_server):
    ask = {"model": model_server.model, "messages": PARIS, "temperature": 0, "max_tokens": 24}
    with synchronous(model_server.process) as client:
        whole = client.chat.completions.create(**ask)
        with client.chat.completions.create(**ask, stream=True) as stream:
            streamed = text_of(stream)
    assert "Paris" in streamed
    assert whole.choices[0].message.content == streamed
