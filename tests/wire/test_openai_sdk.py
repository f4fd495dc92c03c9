"""The unmodified OpenAI SDK writes what we read, and reads what we write."""

from __future__ import annotations

import httpx2
import openai
import pytest

from triolet.core import FinishReason
from triolet.errors import EngineError
from triolet.wire.chat import ChatChunks, ChatRequest, chat_choice, chat_completion
from triolet.wire.codec import decode_request, encode
from triolet.wire.common import error_body, usage_body
from triolet.wire.completions import (
    CompletionChunks,
    CompletionRequest,
    completion,
    completion_choice,
)
from triolet.wire.sse import DONE, KEEPALIVE, encode_data

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def connect():
    """A function from an answer to a client that gets it, and the list of the bodies it sent."""
    clients = []

    def connect(content, content_type="application/json"):
        bodies = []

        def answer(request):
            bodies.append(request.content)
            return httpx2.Response(200, content=content, headers={"content-type": content_type})

        client = openai.OpenAI(
            api_key="k",
            base_url="http://server.invalid/v1",
            http_client=httpx2.Client(transport=httpx2.MockTransport(answer)),
            max_retries=0,
        )
        clients.append(client)
        return client, bodies

    yield connect
    for client in clients:
        client.close()


@pytest.mark.slow  # the SDK builds its models at first use
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": False, "temperature": 0, "top_p": 1, "max_tokens": 16, "seed": -1},
        {"max_completion_tokens": 16, "stop": ["a", "b"], "user": "u", "metadata": {"a": "b"}},
        {"n": 1, "logprobs": False, "presence_penalty": 0, "tools": [], "store": False},
        {"response_format": {"type": "text"}, "service_tier": "auto", "stop": None},
        {"extra_body": {"top_k": 5, "ignore_eos": True, "stop_token_ids": [1]}},
    ],
)
def test_chat_requests_of_the_sdk_are_read(connect, fields):
    reply = chat_completion(
        "chatcmpl-1", 1, "m", [chat_choice(0, "Hello", FinishReason.STOP)], usage_body(3, 2)
    )
    client, bodies = connect(encode(reply))
    answer = client.chat.completions.create(model="m", messages=MESSAGES, **fields)
    request = decode_request(bodies[0], ChatRequest)
    assert request.template_messages() == MESSAGES
    assert answer.choices[0].message.content == "Hello"
    assert answer.usage.total_tokens == 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.slow  # the SDK builds its models at first use
def test_an_answer_of_the_sdk_sent_back_is_read(connect):
    reply = chat_completion(
        "chatcmpl-1", 1, "m", [chat_choice(0, "Hello", FinishReason.STOP)], usage_body(3, 2)
    )
    client, bodies = connect(encode(reply))
    answer = client.chat.completions.create(model="m", messages=MESSAGES)
    history = [*MESSAGES, answer.choices[0].message]
    client.chat.completions.create(model="m", messages=history)
    assert decode_request(bodies[1], ChatRequest).messages[-1].content == "Hello"


@pytest.mark.slow  # the SDK builds its models at first use
def test_the_stream_helper_of_the_sdk_reads_our_chunks(connect):
    chunks = ChatChunks("chatcmpl-1", 1, "m", include_usage=True)
    sent = [
        chunks.text(0, "Hel", first=True),
        chunks.text(0, "lo\u2028"),
        chunks.finish(0, FinishReason.STOP, text="!"),
        chunks.usage(usage_body(3, 3)),
    ]
    stream = b"".join(KEEPALIVE + encode_data(encode(chunk)) for chunk in sent) + DONE
    client, bodies = connect(stream, "text/event-stream; charset=utf-8")
    with client.chat.completions.stream(
        model="m", messages=MESSAGES, stream_options={"include_usage": True}
    ) as events:
        deltas = [event.delta for event in events if event.type == "content.delta"]
        final = events.get_final_completion()
    request = decode_request(bodies[0], ChatRequest)
    assert request.stream
    assert request.stream_options.include_usage
    assert deltas == ["Hel", "lo\u2028", "!"]
    assert final.choices[0].message.content == "Hello\u2028!"
    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].finish_reason == "stop"
    assert final.usage.total_tokens == 6


@pytest.mark.slow  # the SDK builds its models at first use
def test_an_error_event_raises_in_the_sdk(connect):
    chunks = ChatChunks("chatcmpl-1", 1, "m")
    error = error_body(EngineError("The engine failed."))
    stream = encode_data(encode(chunks.text(0, "x", first=True))) + encode_data(encode(error))
    client, _ = connect(stream, "text/event-stream; charset=utf-8")
    answer = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match=r"The engine failed\."):
        list(answer)


@pytest.mark.slow  # the SDK builds its models at first use
@pytest.mark.parametrize("prompt", ["once", ["once"], [1, 2], [[1, 2]]])
def test_completion_requests_of_the_sdk_are_read(connect, prompt):
    reply = completion(
        "cmpl-1", 1, "m", [completion_choice(0, " upon", FinishReason.LENGTH)], usage_body(1, 1)
    )
    client, bodies = connect(encode(reply))
    answer = client.completions.create(model="m", prompt=prompt, max_tokens=1, echo=False)
    request = decode_request(bodies[0], CompletionRequest)
    assert request.prompt in {"once", (1, 2)}
    assert answer.choices[0].text == " upon"


@pytest.mark.slow  # the SDK builds its models at first use
def test_completion_chunks_are_read_by_the_sdk(connect):
    chunks = CompletionChunks("cmpl-1", 1, "m")
    sent = [chunks.text(0, " up"), chunks.finish(0, FinishReason.STOP, "END", text="on")]
    stream = b"".join(encode_data(encode(chunk)) for chunk in sent) + DONE
    client, _ = connect(stream, "text/event-stream; charset=utf-8")
    answer = client.completions.create(model="m", prompt="once", stream=True)
    assert "".join(chunk.choices[0].text for chunk in answer) == " upon"
