"""The unmodified OpenAI SDK writes what we read, and reads what we write."""

from __future__ import annotations

import httpx2
import openai
import pytest

from triolet.core import FinishReason
from triolet.errors import EngineError
from triolet.wire.chat import ChatRequest
from triolet.wire.chat_reply import ChatBodies
from triolet.wire.codec import decode_request, encode
from triolet.wire.common import error_body, usage_body
from triolet.wire.completion_reply import CompletionBodies
from triolet.wire.completions import CompletionRequest
from triolet.wire.said import Said
from triolet.wire.sse import DONE, KEEPALIVE, encode_data

CHAT = ChatBodies("chatcmpl-1", 1, "m")
TEXT = CompletionBodies("cmpl-1", 1, "m")
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
        {"n": 2, "logprobs": True, "top_logprobs": 3, "logit_bias": {"50256": -100}},
        {"n": 1, "logprobs": False, "presence_penalty": 0, "tools": [], "store": False},
        {"response_format": {"type": "text"}, "service_tier": "auto", "stop": None},
        {"extra_body": {"top_k": 5, "ignore_eos": True, "stop_token_ids": [1]}},
    ],
)
def test_chat_requests_of_the_sdk_are_read(connect, fields):
    reply = CHAT.whole([Said(0, "Hello", reason=FinishReason.STOP)], usage_body(3, 2))
    client, bodies = connect(encode(reply))
    answer = client.chat.completions.create(model="m", messages=MESSAGES, **fields)
    request = decode_request(bodies[0], ChatRequest)
    assert [message.for_template() for message in request.messages] == MESSAGES
    assert answer.choices[0].message.content == "Hello"
    assert answer.usage.total_tokens == 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.slow  # the SDK builds its models at first use
def test_an_answer_of_the_sdk_sent_back_is_read(connect):
    reply = CHAT.whole([Said(0, "Hello", reason=FinishReason.STOP)], usage_body(3, 2))
    client, bodies = connect(encode(reply))
    answer = client.chat.completions.create(model="m", messages=MESSAGES)
    history = [*MESSAGES, answer.choices[0].message]
    client.chat.completions.create(model="m", messages=history)
    assert decode_request(bodies[1], ChatRequest).messages[-1].content == "Hello"


@pytest.mark.slow  # the SDK builds its models at first use
def test_the_stream_helper_of_the_sdk_reads_our_chunks(connect):
    bodies = ChatBodies("chatcmpl-1", 1, "m", include_usage=True)
    sent = [
        bodies.chunk(Said(0, "Hel", first=True)),
        bodies.chunk(Said(0, "lo\u2028")),
        bodies.chunk(Said(0, "!", reason=FinishReason.STOP)),
        bodies.usage(usage_body(3, 3)),
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


def logprobs(letter):
    top = [{"token": letter, "logprob": -0.5, "bytes": [ord(letter)]}]
    return {"content": [{**top[0], "top_logprobs": top}], "refusal": None}


@pytest.mark.slow  # the SDK builds its models at first use
def test_the_stream_helper_adds_up_choices_and_logprobs(connect):
    sent = [
        CHAT.opening(0),
        # The helper counts the logprobs of the chunk twice in which it meets a later choice.
        CHAT.opening(1),
        CHAT.chunk(Said(1, "b", logprobs("b"))),
        CHAT.chunk(Said(0, "a", logprobs("a"))),
        CHAT.chunk(Said(0, "", logprobs("x"))),
        CHAT.chunk(Said(1, reason=FinishReason.STOP)),
        CHAT.chunk(Said(0, "c", logprobs("c"), reason=FinishReason.STOP)),
    ]
    stream = b"".join(encode_data(encode(chunk)) for chunk in sent) + DONE
    client, _ = connect(stream, "text/event-stream; charset=utf-8")
    with client.chat.completions.stream(model="m", messages=MESSAGES, n=2, logprobs=True) as events:
        deltas = [e for e in events if e.type == "logprobs.content.delta"]
        final = events.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["ac", "b"]
    tokens = [[one.token for one in choice.logprobs.content] for choice in final.choices]
    assert tokens == [["a", "x", "c"], ["b"]]
    assert len(deltas) == 4


@pytest.mark.slow  # the SDK builds its models at first use
def test_the_sdk_types_the_logprobs_of_a_completion(connect):
    said = {
        "tokens": ["a"],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }
    reply = TEXT.whole([Said(0, "a", said, reason=FinishReason.LENGTH)], usage_body(1, 1))
    client, _ = connect(encode(reply))
    answer = client.completions.create(model="m", prompt="a", logprobs=0, echo=True)
    assert answer.choices[0].logprobs.tokens == ["a"]
    assert answer.choices[0].logprobs.text_offset == [0]


@pytest.mark.slow  # the SDK builds its models at first use
def test_an_error_event_raises_in_the_sdk(connect):
    error = error_body(EngineError("The engine failed."))
    stream = encode_data(encode(CHAT.chunk(Said(0, "x", first=True)))) + encode_data(encode(error))
    client, _ = connect(stream, "text/event-stream; charset=utf-8")
    answer = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match=r"The engine failed\."):
        list(answer)


@pytest.mark.slow  # the SDK builds its models at first use
@pytest.mark.parametrize("prompt", ["once", ["once"], [1, 2], [[1, 2]], ["once", "twice"]])
def test_completion_requests_of_the_sdk_are_read(connect, prompt):
    reply = TEXT.whole([Said(0, " upon", reason=FinishReason.LENGTH)], usage_body(1, 1))
    client, bodies = connect(encode(reply))
    answer = client.completions.create(model="m", prompt=prompt, max_tokens=1, echo=False)
    request = decode_request(bodies[0], CompletionRequest)
    assert request.prompt in {("once",), ((1, 2),), ("once", "twice")}
    assert answer.choices[0].text == " upon"


@pytest.mark.slow  # the SDK builds its models at first use
def test_completion_chunks_are_read_by_the_sdk(connect):
    sent = [
        TEXT.chunk(Said(0, " up")),
        TEXT.chunk(Said(0, "on", reason=FinishReason.STOP, stop_reason="END")),
    ]
    stream = b"".join(encode_data(encode(chunk)) for chunk in sent) + DONE
    client, _ = connect(stream, "text/event-stream; charset=utf-8")
    answer = client.completions.create(model="m", prompt="once", stream=True)
    assert "".join(chunk.choices[0].text for chunk in answer) == " upon"
