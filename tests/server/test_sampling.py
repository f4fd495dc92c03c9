"""What the engine is told of a request: defaults, limits, ids of words."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest

from triolet.core import SamplingParams
from triolet.server.translate import encode_words
from triolet.testing.asgi import open_server
from triolet.testing.engine import ScriptedBackend, say, serve_script
from triolet.wire.codec import decode_request
from triolet.wire.completions import CompletionRequest

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "seed": 7}
TEXT = {"model": "scripted", "prompt": "hi", "seed": 7}
OWN = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.01,
    "repetition_penalty": 1.05,
    "max_new_tokens": 9,
}


async def asked(body, path="/v1/chat/completions", defaults=None):
    """The engine's request, of a body that was answered."""
    seen = []

    def scripts(request):
        seen.append(request)
        return say("x")(request)

    served = serve_script(ScriptedBackend(scripts))
    served = attrs.evolve(served, info=attrs.evolve(served.info, default_sampling=defaults or {}))
    async with open_server(served) as server:
        response = await server.client.request("POST", path, json_body=body)
    assert response.status == 200, response.body
    return seen[0]


async def test_a_request_that_says_nothing_gets_openais_defaults(autojump_clock):
    request = await asked(CHAT)
    room = 4096 - len(request.prompt_ids)
    assert request.sampling == SamplingParams(max_tokens=room, seed=7)
    assert request.n == 1


async def test_the_models_own_defaults_come_before_openais(autojump_clock):
    sampling = (await asked(CHAT, defaults=OWN)).sampling
    assert sampling == SamplingParams(
        max_tokens=9,
        seed=7,
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        min_p=0.01,
        repetition_penalty=1.05,
    )
    assert type(sampling.top_k) is int


async def test_the_bodys_own_values_come_before_the_models(autojump_clock):
    fields = {
        "max_tokens": 20,
        "temperature": 0,
        "top_p": 1,
        "top_k": -1,
        "min_p": 0,
        "repetition_penalty": 1,
    }
    sampling = (await asked({**CHAT, **fields}, defaults=OWN)).sampling
    assert sampling == SamplingParams(max_tokens=20, seed=7, temperature=0.0)


async def test_a_text_completion_keeps_openais_sixteen_tokens(autojump_clock):
    assert (await asked(TEXT, "/v1/completions", OWN)).sampling.max_tokens == 16


async def test_every_field_reaches_the_engine(autojump_clock):
    fields = {
        "n": 2,
        "max_tokens": 5,
        "min_tokens": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"97": -100},
        "allowed_token_ids": [97, 98],
        "bad_words": ["c"],
        "stop": ["<|end|>", "x"],
        "stop_token_ids": [99],
        "prompt_logprobs": 2,
        "logprobs": True,
        "top_logprobs": 4,
    }
    request = await asked({**CHAT, **fields})
    assert request.n == 2
    assert request.sampling == SamplingParams(
        max_tokens=5,
        seed=7,
        min_tokens=3,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((97, -100.0),),
        allowed_token_ids=frozenset({97, 98}),
        bad_words_ids=((99,),),
        stop_token_ids=frozenset({99, 261}),
        logprobs=4,
        prompt_logprobs=2,
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logprobs": 3}, (3, None)),
        ({"echo": True}, (None, None)),
        ({"echo": True, "logprobs": 3}, (3, 3)),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 5}, (3, 5)),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 0}, (3, 3)),
        ({"prompt_logprobs": 0}, (None, 0)),
    ],
)
async def test_an_echo_with_logprobs_scores_the_prompt(autojump_clock, fields, expected):
    sampling = (await asked({**TEXT, **fields}, "/v1/completions")).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == expected


async def test_min_tokens_hold_off_stop_strings(autojump_clock):
    served = serve_script(ScriptedBackend(say("no no no yes")))
    body = {**CHAT, "stop": ["no"], "min_tokens": 4}
    async with open_server(served) as server:
        answer = await server.client.request("POST", "/v1/chat/completions", json_body=body)
    assert answer.json()["choices"][0]["message"]["content"] == "no "


#: A tokenizer with one token for a cat at the start of a text and another for one within, and
#: with a token for the space before a hat.
WORDS = {"cat": [1], " cat": [2], "hat": [3], " hat": [0, 3], "o": [5], " o": [5], " ": [0]}
TOKENIZER = SimpleNamespace(
    vocabulary=SimpleNamespace(special_ids=frozenset()),
    encode=lambda text, **_: WORDS[text],
)


@pytest.mark.parametrize(
    ("word", "banned"),
    [
        ("cat", ((1,), (2,))),
        (" cat", ((1,), (2,))),
        # The word is the same within a text as at its start, so one ban is enough.
        ("hat", ((3,),)),
        ("o", ((5,),)),
    ],
)
def test_a_bad_word_is_banned_at_the_start_and_within_a_text(word, banned):
    body = b'{"model": "m", "prompt": "x", "bad_words": ["%s"]}' % word.encode()
    words = encode_words(TOKENIZER, decode_request(body, CompletionRequest))
    assert words.bad_words_ids == banned
