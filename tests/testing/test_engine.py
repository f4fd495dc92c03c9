from __future__ import annotations

import math

import pytest
import trio

from triolet.core import EngineRequest, FinishReason, RequestId, SamplingParams
from triolet.prompt.bytelevel import BYTE_EOS_ID
from triolet.testing.engine import (
    SCORED_IDS,
    Script,
    ScriptedBackend,
    echo,
    say,
    say_each,
    score,
)


async def outputs_of(backend: ScriptedBackend, request: EngineRequest):
    """All that a backend says of one request, in order."""
    outputs = []
    send, receive = trio.open_memory_channel(1)
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run, send)
        backend.submit(request)
        ended = 0
        while ended < request.n:
            step = await receive.receive()
            outputs += step.outputs
            ended += sum(output.finish is not None for output in step.outputs)
        nursery.cancel_scope.cancel()
    return outputs


def request(prompt=b"hello", n=1, **sampling):
    sampling.setdefault("max_tokens", 9)
    return EngineRequest(RequestId("a"), tuple(prompt), SamplingParams(**sampling), n)


def text_of(outputs, choice):
    ids = [id_ for output in outputs if output.choice == choice for id_ in output.token_ids]
    return bytes(id_ for id_ in ids if id_ < BYTE_EOS_ID)


@pytest.mark.parametrize("index", [0, 1, 100_000])
def test_made_up_probabilities_are_a_distribution_with_distinct_ranks(index):
    ranked = score(0, index, SCORED_IDS).top
    assert sorted(id_ for id_, _ in ranked) == list(range(SCORED_IDS))
    assert [logprob for _, logprob in ranked] == sorted((lp for _, lp in ranked), reverse=True)
    assert sum(math.exp(logprob) for _, logprob in ranked) == pytest.approx(1)
    for rank, (id_, logprob) in enumerate(ranked, 1):
        scored = score(id_, index, 2)
        assert (scored.token_id, scored.logprob, scored.rank) == (id_, logprob, rank)
        assert scored.top == ranked[:2]


def test_made_up_probabilities_tell_places_apart():
    assert score(5, 3, 0) != score(5, 4, 0)
    assert score(5, 3, 0).top == ()


async def test_tokens_and_prompt_are_scored_where_asked(autojump_clock):
    asked = request(n=2, logprobs=3, prompt_logprobs=1)
    outputs = await outputs_of(ScriptedBackend(say_each("ab", "c"), block_size=2), asked)
    for choice, text in enumerate([b"ab", b"c"]):
        scores = [scored for o in outputs if o.choice == choice for scored in o.logprobs]
        ids = [*text, BYTE_EOS_ID]
        assert scores == [score(id_, index, 3) for index, id_ in enumerate(ids)]
    prompt = tuple(score(id_, position, 1) for position, id_ in enumerate(b"hello"))
    assert [o.prompt_logprobs for o in outputs if o.prompt_logprobs] == [prompt[1:]]
    assert outputs[0].prompt_logprobs == prompt[1:]


async def test_nothing_is_scored_unasked(autojump_clock):
    outputs = await outputs_of(ScriptedBackend(say("ab")), request())
    assert all(output.logprobs == output.prompt_logprobs == () for output in outputs)


async def test_each_choice_plays_its_own_script_over_again_where_there_are_fewer(autojump_clock):
    outputs = await outputs_of(
        ScriptedBackend(say_each("one", "two"), max_num_seqs=2), request(n=3)
    )
    assert [text_of(outputs, choice) for choice in range(3)] == [b"one", b"two", b"one"]


async def test_one_script_serves_all_choices(autojump_clock):
    outputs = await outputs_of(ScriptedBackend(echo), request(n=2))
    assert [text_of(outputs, choice) for choice in range(2)] == [b"hello", b"hello"]


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"min_tokens": 4}, b"a~~"),
        ({"min_tokens": 2}, b"a"),
        ({"min_tokens": 4, "stop_token_ids": frozenset(b"a~")}, b"}}}"),
        ({"min_tokens": 12}, b"a~~~~~~~~"),
    ],
    ids=["held off", "in time", "the filler stops too", "beyond max_tokens"],
)
async def test_a_script_cannot_end_before_min_tokens(autojump_clock, sampling, said):
    outputs = await outputs_of(ScriptedBackend(say("a")), request(**sampling))
    assert text_of(outputs, 0) == said
    stopped = outputs[-1].token_ids == (BYTE_EOS_ID,)
    assert outputs[-1].finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert len(outputs) == min(9, max(2, sampling["min_tokens"]))


async def test_a_scripted_request_is_forgotten_with_its_last_choice(autojump_clock):
    scripts = (Script((), 97), Script((), BYTE_EOS_ID))
    backend = ScriptedBackend(lambda _: scripts)
    await outputs_of(backend, request(n=2))
    assert not backend._runner._live
