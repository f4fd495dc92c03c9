"""Contract §8: what each kind of bad input gets, and that nothing remains of it."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from tests.server.reading import held

from triolet.config import Config
from triolet.server.http import DISCARD_LIMIT_BYTES
from triolet.testing.asgi import open_server
from triolet.testing.engine import ScriptedBackend, say, serve_script

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
#: Good on both endpoints: each ignores the other's prompt.
GOOD = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
#: The tokens of the scripted model's context, and of the prompt above with its template or BOS.
CONTEXT = 64
PROMPT_TOKENS = {CHAT: 6, TEXT: 3}
#: A parser that recurses dies of them.
BRACKETS = 10_000
#: Stands in a message for the JSON parser's own words.
ANY_REASON = "…"
TYPES = {404: "not_found_error"}


@attrs.frozen
class Bad:
    """One bad request and its answer.

    As ``body``, a dict changes the good one, where None removes; an int is that many spaces.
    """

    name: str
    body: dict[str, Any] | bytes | int
    message: str
    param: str | None = None
    code: str = "invalid_request"
    status: int = 400
    paths: tuple[str, ...] = (CHAT, TEXT)
    method: str = "POST"
    headers: dict[str, str] = attrs.field(factory=dict)

    def encoded(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        if isinstance(self.body, int):
            return b" " * self.body
        fields = {**GOOD, **self.body}
        return json.dumps({k: v for k, v in fields.items() if v is not None}).encode()


def field(name, value, sentence, *, at=None, paths=(CHAT, TEXT)):
    at = at or name
    label = f"{name} {json.dumps(value)[:50]}"
    return Bad(label, {name: value}, f"`{at}` {sentence}", at, paths=paths)


def chat(name, value, sentence, *, at=None):
    return field(name, value, sentence, at=at, paths=(CHAT,))


def prompt(value, sentence, *, at=None):
    return field("prompt", value, sentence, at=at, paths=(TEXT,))


def second_message(value, sentence, *, at):
    at = f"messages[1]{at}"
    messages = {"messages": [*GOOD["messages"], value]}
    return Bad(f"message {value}", messages, f"`{at}` {sentence}", at, paths=(CHAT,))


def unsupported(name, value, *neutral, paths=(CHAT, TEXT)):
    allowed = " or ".join([*neutral, "null"])
    sentence = f"with this value is not supported yet: leave it out, or send {allowed}."
    return field(name, value, sentence, paths=paths)


def not_json(name, body, reason=ANY_REASON):
    return Bad(name, body, f"The body is not valid JSON: {reason}.")


def with_number(name, number):
    """The good body with a number that Python's encoder would write otherwise, or not at all."""
    return json.dumps(GOOD)[:-1].encode() + f',"{name}":{number}}}'.encode()


def too_long(name, body, path, tokens, more, param):
    message = (
        f"The model's context is {CONTEXT} tokens; the prompt has {tokens} and {more} more "
        "were asked for."
    )
    return Bad(name, body, message, param, "context_length_exceeded", paths=(path,))


def too_large(name, body, **headers):
    message = "The body is longer than 4194304 bytes, the server's limit."
    return Bad(name, body, message, code="body_too_large", status=413, headers=headers)


def wrong_type(declared, shown):
    return Bad(
        f"content type {declared!r}",
        {},
        f"The body must be JSON (Content-Type: application/json), not {shown!r}.",
        code="unsupported_media_type",
        status=415,
        headers={"content-type": declared},
    )


def wrong_method(method):
    return [
        Bad(
            f"{method} {path}",
            b"",
            f"{method} is not allowed on {path}.",
            code="method_not_allowed",
            status=405,
            paths=(path,),
            method=method,
        )
        for path in (CHAT, TEXT)
    ]


def unknown_path(method, path):
    message = f"There is no {method} {path}."
    return Bad(
        f"{method} {path}", {}, message, code="not_found", status=404, paths=(path,), method=method
    )


LIMIT = "must be at least 1, not"
TEMPERATURE = "must be at least 0 and at most 2, not"

CASES = [
    not_json("nothing", b""),
    not_json("text", b"hello"),
    Bad("an array", b"[]", "The body must be a JSON object, not an array."),
    Bad("null", b"null", "The body must be a JSON object, not null."),
    not_json("invalid utf-8", b'{"model": "\xc3\x28"}', "byte 11 is not valid UTF-8"),
    not_json("utf-16", '{"model": "x"}'.encode("utf-16"), "byte 0 is not valid UTF-8"),
    not_json("a lone surrogate", b'{"model": "\\ud800"}'),
    not_json("brackets", b"[" * BRACKETS + b"]" * BRACKETS),
    not_json("open brackets", b"[" * BRACKETS),
    not_json("braces", b'{"a":' * BRACKETS + b"1" + b"}" * BRACKETS),
    not_json("a NaN", with_number("temperature", "NaN")),
    not_json("an infinity", with_number("temperature", "1e999")),
    too_large("50 MB", 50_000_000),
    too_large("a byte over the limit", 10 * 2**20 + 1),
    too_large(
        "declared beyond what is thrown away",
        b"{",
        **{"content-length": str(DISCARD_LIMIT_BYTES + 1)},
    ),
    wrong_type("text/plain", "text/plain"),
    wrong_type("application/x-www-form-urlencoded", "application/x-www-form-urlencoded"),
    wrong_type("multipart/form-data; boundary=x", "multipart/form-data"),
    wrong_type("", ""),
    *wrong_method("GET"),
    *wrong_method("PUT"),
    *wrong_method("DELETE"),
    unknown_path("POST", "/"),
    unknown_path("POST", "/v1/embeddings"),
    unknown_path("POST", "/v1/completions/"),
    unknown_path("GET", "/v1/chat/completions/7"),
    # The model.
    field("model", None, "is required."),
    field("model", "", "must not be empty."),
    field("model", 7, "must be a string, not the number 7."),
    field("model", "x" * 600, "must have 1 to 512 characters, not 600."),
    Bad(
        "an unknown model",
        {"model": "gpt-4"},
        "The model 'gpt-4' is not served here; served: 'scripted'.",
        "model",
        "model_not_found",
        status=404,
    ),
    # Messages.
    chat("messages", None, "is required."),
    chat("messages", [], "must not be empty."),
    chat("messages", "hi", "must be an array, not the string 'hi'."),
    chat("messages", {}, "must be an array, not an object."),
    second_message("hi", "must be an object, not the string 'hi'.", at=""),
    second_message({"content": "hi"}, "is required.", at=".role"),
    second_message(
        {"role": "wizard", "content": "hi"},
        "must be one of 'system', 'developer', 'user' and 'assistant', not the string 'wizard'.",
        at=".role",
    ),
    second_message({"role": 1, "content": "hi"}, "must be a string, not the number 1.", at=".role"),
    second_message({"role": "user"}, "is required.", at=".content"),
    second_message(
        {"role": "user", "content": 7},
        "must be a string or an array of text parts, not the number 7.",
        at=".content",
    ),
    second_message(
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        "must be 'text', the only supported part, not the string 'image_url'.",
        at=".content[0].type",
    ),
    second_message(
        {"role": "tool", "content": "42"},
        "is 'tool': tool messages are not supported yet.",
        at=".role",
    ),
    # Prompts.
    prompt(None, "is required."),
    prompt("", "must not be empty."),
    prompt([], "must not be empty."),
    prompt(7, "must be a string or an array of token ids, not the number 7."),
    prompt(["a", ""], "must not be empty.", at="prompt[1]"),
    prompt(
        ["a", 7], "must be a string or an array of token ids, not the number 7.", at="prompt[1]"
    ),
    prompt(["a"] * 129, "must have at most 128 prompts, not 129."),
    prompt([[1], [1, 262]], "is 262, outside the vocabulary of 262 ids.", at="prompt[1][1]"),
    Bad(
        "too many choices",
        {"prompt": ["a"] * 33, "n": 8},
        "`prompt` times `n` must be at most 256 choices, not 264.",
        "n",
        paths=(TEXT,),
    ),
    too_long("one of two", {"prompt": ["a", "x" * 63]}, TEXT, CONTEXT, "at least 1", "prompt[1]"),
    prompt([1, 262], "is 262, outside the vocabulary of 262 ids.", at="prompt[1]"),
    prompt([-1], "must be at least 0 and at most 2147483647, not -1.", at="prompt[0]"),
    prompt([1, 2.5], "must be an integer, not the number 2.5.", at="prompt[1]"),
    prompt([1, True], "must be an integer, not true.", at="prompt[1]"),
    too_long(
        "long messages",
        {"messages": [{"role": "user", "content": "x" * CONTEXT}]},
        CHAT,
        CONTEXT + 4,
        "at least 1",
        "messages",
    ),
    too_long("a long prompt", {"prompt": "x" * 63}, TEXT, CONTEXT, "at least 1", "prompt"),
    too_long("many ids", {"prompt": [1] * 90}, TEXT, 90, "at least 1", "prompt"),
    # Limits of output.
    *(
        case
        for path, tokens in PROMPT_TOKENS.items()
        for case in (
            too_long("a token", {"max_tokens": 62}, path, tokens, 62, "max_tokens"),
            too_long("huge", {"max_tokens": 10**18}, path, tokens, 10**18, "max_tokens"),
        )
    ),
    too_long(
        "by its other name", {"max_completion_tokens": 99}, CHAT, 6, 99, "max_completion_tokens"
    ),
    field("max_tokens", 0, f"{LIMIT} 0."),
    field("max_tokens", -1, f"{LIMIT} -1."),
    field("max_tokens", "5", "must be an integer, not the string '5'."),
    field("max_tokens", 1.5, "must be an integer, not the number 1.5."),
    field("max_tokens", value=True, sentence="must be an integer, not true."),
    Bad(
        "max_tokens beyond 64 bits",
        with_number("max_tokens", "1" + "0" * 30),
        "`max_tokens` must be an integer, not the number 1e+30.",
        "max_tokens",
    ),
    chat("max_completion_tokens", 0, f"{LIMIT} 0."),
    # Types and ranges of the rest.
    field("stream", "false", "must be true or false, not the string 'false'."),
    field("stream", 0, "must be true or false, not the number 0."),
    field("stream_options", {}, "is only allowed with `stream` set to true."),
    field("temperature", -0.1, f"{TEMPERATURE} -0.1."),
    field("temperature", 2.1, f"{TEMPERATURE} 2.1."),
    field("temperature", "NaN", "must be a number, not the string 'NaN'."),
    field("temperature", value=True, sentence="must be a number, not true."),
    field("top_p", 0, "must be greater than 0 and at most 1, not 0."),
    field("top_k", -2, "must be at least -1, not -2."),
    field("seed", 0.5, "must be an integer of at most 64 bits, not the number 0.5."),
    field("stop", ["a", 1], "must be a string, not the number 1.", at="stop[1]"),
    field(
        "stop_token_ids",
        [0, 262],
        "is 262, outside the vocabulary of 262 ids.",
        at="stop_token_ids[1]",
    ),
    field("timeout", -1, "must be greater than 0, not -1."),
    Bad(
        "a timeout header of NaN",
        {},
        "X-Request-Timeout must be a positive number of seconds.",
        "X-Request-Timeout",
        headers={"x-request-timeout": "nan"},
    ),
    # Choices.
    field("n", 0, f"{LIMIT} 0."),
    field("n", 1.0, "must be an integer, not the number 1.0."),
    field("n", 17, "must be at most 16, the server's --max-n, not 17."),
    field("n", 10**15, f"must be at most 16, the server's --max-n, not {10**15}."),
    field(
        "best_of",
        2,
        "must be `n`, which is 1, not 2: choices are not ranked here, all of them are returned.",
    ),
    # Stops.
    field("stop", "", "must not be empty: every text contains the empty string."),
    field(
        "stop", ["a", ""], "must not be empty: every text contains the empty string.", at="stop[1]"
    ),
    field("stop", ["x"] * 10_000, "must have at most 32 strings, not 10000."),
    field("stop", "x" * 1_000_000, "must have at most 1024 characters, not 1000000."),
    # Which tokens are chosen.
    Bad(
        "a seed of 65 bits",
        with_number("seed", 2**64),
        f"`seed` must be an integer of at most 64 bits, not the number {float(2**64)}.",
        "seed",
    ),
    field("min_tokens", -1, "must be at least 0, not -1."),
    Bad(
        "min_tokens over max_tokens",
        {"min_tokens": 6, "max_tokens": 5},
        "`min_tokens` must be at most 5, what `max_tokens` or the model's context allows, not 6.",
        "min_tokens",
    ),
    field("min_p", 1.5, "must be at least 0 and at most 1, not 1.5."),
    field("presence_penalty", 2.5, "must be at least -2 and at most 2, not 2.5."),
    field("frequency_penalty", "0", "must be a number, not the string '0'."),
    field("repetition_penalty", 0, "must be at least 0.01 and at most 100, not 0."),
    not_json("a bias of NaN", json.dumps(GOOD)[:-1].encode() + b',"logit_bias":{"1":NaN}}'),
    field("logit_bias", {"a": 1}, "must be an object with token ids as keys, not the string 'a'."),
    field(
        "logit_bias",
        {"262": 1},
        "is for an id outside the vocabulary of 262 ids.",
        at="logit_bias.262",
    ),
    field(
        "logit_bias",
        {"1": 101},
        "must be at least -100.0 and at most 100.0, not 101.",
        at="logit_bias.1",
    ),
    field("allowed_token_ids", [], "must not be empty."),
    field("allowed_token_ids", [1, 262], "has 262, outside the vocabulary of 262 ids."),
    Bad(
        "nothing to choose from",
        {"allowed_token_ids": [257, 97], "min_tokens": 1, "bad_words": ["a"]},
        "`allowed_token_ids` leaves no token to choose: `bad_words` and `min_tokens` ban all of "
        "them.",
        "allowed_token_ids",
    ),
    field("bad_words", "a", "must be an array, not the string 'a'."),
    field("bad_words", ["a", ""], "must not be empty.", at="bad_words[1]"),
    unsupported("typical_p", 0.5, "1"),
    # Logprobs.
    chat("logprobs", 5, "must be true or false, not the number 5."),
    field("logprobs", value=True, sentence="must be an integer, not true.", paths=(TEXT,)),
    field("logprobs", -1, "must be at least 0, not -1.", paths=(TEXT,)),
    field(
        "logprobs", 21, "must be at most 20, the server's --max-logprobs, not 21.", paths=(TEXT,)
    ),
    chat("top_logprobs", 2, "is only allowed with `logprobs` set to true."),
    Bad(
        "top_logprobs over the limit",
        {"logprobs": True, "top_logprobs": 21},
        "`top_logprobs` must be at most 20, the server's --max-logprobs, not 21.",
        "top_logprobs",
        paths=(CHAT,),
    ),
    unsupported("top_logprobs", 2, "0", paths=(TEXT,)),
    field("prompt_logprobs", 21, "must be at most 20, the server's --max-logprobs, not 21."),
    field("prompt_logprobs", -1, "must be at least 0, not -1."),
    field("echo", "yes", "must be true or false, not the string 'yes'.", paths=(TEXT,)),
    unsupported("echo", "yes", "false", paths=(CHAT,)),
    *(
        Bad(
            f"many numbers by {param}",
            {"prompt": [[1] * 7, [1] * 8], "echo": True, param: 5},
            f"`{param}` asks for 90 numbers about the prompt, and 80 are the most: ask for fewer, "
            "or send a shorter prompt.",
            param,
            paths=(TEXT,),
        )
        for param in ("logprobs", "prompt_logprobs")
    ),
    # The chat template.
    Bad(
        "both turns",
        {"add_generation_prompt": True, "continue_final_message": True},
        "The last message cannot be continued and followed by a new turn: set "
        "add_generation_prompt to false.",
        "continue_final_message",
        paths=(CHAT,),
    ),
    Bad(
        "a template in disguise",
        {"chat_template_kwargs": {"chat_template": "{{ x }}"}},
        "chat_template cannot be set through chat_template_kwargs.",
        "chat_template_kwargs",
        paths=(CHAT,),
    ),
    chat(
        "chat_template_kwargs",
        {"x": "y" * 20_000},
        "must have at most 16384 bytes, not 20008.",
    ),
    # Known, would change the result, not there yet.
    unsupported("response_format", {"type": "json_object"}, '{"type":"text"}'),
    unsupported("guided_json", {}),
    unsupported("tools", [{"type": "function", "function": {"name": "f"}}], "[]", paths=(CHAT,)),
    unsupported("reasoning_effort", "low", paths=(CHAT,)),
    unsupported("chat_template", "{{ x }}", paths=(CHAT,)),
    unsupported("suffix", "x", '""', paths=(TEXT,)),
]


@pytest.fixture
def served(monkeypatch):
    # Few enough that a body of this file can ask for more.
    monkeypatch.setattr("triolet.server.translate.MAX_PROMPT_SCORES", 80)
    return serve_script(ScriptedBackend(say("well"), max_model_len=CONTEXT))


@pytest.mark.parametrize(
    ("path", "case"),
    [
        pytest.param(path, case, id=f"{case.name} to {path}")
        for case in CASES
        for path in case.paths
    ],
)
async def test_bad_input_is_refused_and_nothing_remains_of_it(autojump_clock, served, case, path):
    async with open_server(served) as server:
        refused = await server.client.request(
            case.method, path, body=case.encoded(), headers=case.headers
        )
        assert held(server) == (0, 0, 0)
        assert server.runtime.backend().statistics().steps == 0
        after = await server.client.request(
            "POST", path if path in (CHAT, TEXT) else CHAT, json_body=GOOD
        )
    body = refused.json()
    message = body["error"]["message"]
    start, _, end = case.message.partition(ANY_REASON)
    assert message == case.message or (end and message.startswith(start) and message.endswith(end))
    assert body == {
        "error": {
            "message": message,
            "type": TYPES.get(case.status, "invalid_request_error"),
            "param": case.param,
            "code": case.code,
        }
    }
    assert refused.status == case.status
    assert refused.headers["content-type"] == "application/json"
    assert refused.complete
    assert after.status == 200


async def test_a_refused_method_says_which_is_allowed(autojump_clock, served):
    async with open_server(served) as server:
        refused = await server.client.request("GET", CHAT)
    assert refused.headers["allow"] == "POST"


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("declared", ["application/json", "Application/JSON; charset=utf-8"])
async def test_unknown_fields_and_odd_spellings_are_accepted(
    autojump_clock, served, path, declared
):
    body = {**GOOD, "frobnicate": {"a": [1]}, "n": 1, "stop": None, "temperature": 2}
    async with open_server(served) as server:
        response = await server.client.request(
            "POST", path, json_body=body, headers={"content-type": declared}
        )
    assert response.status == 200


async def test_a_limit_above_what_is_thrown_away_holds(autojump_clock, served):
    config = Config(max_body_size=DISCARD_LIMIT_BYTES + 1)
    async with open_server(served, config) as server:
        response = await server.client.request(
            "POST", CHAT, json_body=GOOD, headers={"content-length": str(DISCARD_LIMIT_BYTES + 1)}
        )
    assert response.status == 200


async def test_refusals_are_counted(autojump_clock, served):
    async with open_server(served) as server:
        for body in (b"x", b"{}", b'{"model": "gpt-4"}'):
            await server.client.request("POST", CHAT, body=body)
        metrics = (await server.client.request("GET", "/metrics")).body.decode()
    assert 'triolet_requests_total{outcome="rejected"} 3.0' in metrics


async def test_a_prompt_that_cannot_fit_is_refused_without_tokenizing_it(monkeypatch):
    async with open_server() as server:
        tokenizer = server.runtime.served.tokenizer
        longest = server.runtime.served.info.max_model_len * len("<|assistant|>")
        body = {"model": "scripted", "prompt": "x" * (4 * longest + 1)}
        calls = []
        monkeypatch.setattr(type(tokenizer), "encode", lambda _, text, **__: calls.append(text))
        response = await server.client.request("POST", "/v1/completions", json_body=body)
    assert (response.status, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert response.json()["error"]["param"] == "prompt"
    assert calls == []


async def test_template_arguments_nested_beyond_the_writers_depth_are_a_400(autojump_clock):
    nested = []
    for _ in range(300):
        nested = [nested]
    messages = [{"role": "user", "content": "hi"}]
    kwargs = {"x": nested}
    body = {"model": "scripted", "messages": messages, "chat_template_kwargs": kwargs}
    async with open_server() as server:
        response = await server.client.request("POST", "/v1/chat/completions", json_body=body)
    assert response.status == 400
    assert response.json()["error"]["param"] == "chat_template_kwargs"


async def test_more_prompts_than_the_server_ever_takes_are_no_matter_of_waiting(autojump_clock):
    config = Config(max_num_seqs=1, max_num_queued_reqs=1)
    body = {"model": "scripted", "prompt": ["a", "b", "c"]}
    async with open_server(config=config) as server:
        response = await server.client.request("POST", "/v1/completions", json_body=body)
        assert held(server) == (0, 0, 0)
    assert (response.status, response.json()["error"]["param"]) == (400, "prompt")
