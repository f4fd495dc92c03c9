# ruff: noqa: E402 - what needs torch is imported after importorskip
from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.rows import chunk_of, new_sampler, random_logits, sampled
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triolet.core import SamplingParams
from triolet.engine import sampler as sampler_module
from triolet.engine.masks import RowMasks, apply_masks
from triolet.engine.plan import NOTHING_LEFT

pytestmark = pytest.mark.torch

SMALL = 12
EOS = frozenset({2, 11})
GRID = 512


def params(**options):
    return SamplingParams(**{"max_tokens": 99, **options})


def masked(logits, sampling, *, prompt=(1,), output=()):
    changed = logits.clone()[None]
    row = RowMasks(sampling, EOS, logits.shape[-1])
    apply_masks(changed, [0], [row], [chunk_of(0, sampling, prompt=prompt, output=output)])
    return changed[0]


ids = st.integers(0, 3)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    words=st.lists(st.lists(ids, min_size=1, max_size=4), min_size=1, max_size=6),
    prompt=st.lists(ids, min_size=1, max_size=5),
    output=st.lists(ids, max_size=5),
)
def test_bad_words_are_those_of_transformers_over_prompt_and_output(words, prompt, output):
    logits = random_logits(1, vocabulary=SMALL)[0]

    ours = masked(
        logits, params(bad_words_ids=tuple(map(tuple, words))), prompt=prompt, output=output
    )

    context = torch.tensor([[*prompt, *output]])
    assert ours.equal(NoBadWordsLogitsProcessor(words)(context, logits[None])[0])


def test_a_bias_is_that_of_transformers():
    logits = random_logits(1, vocabulary=SMALL)[0]
    bias = {3: 4.5, 0: -100.0, 11: 0.25}

    ours = masked(logits, params(logit_bias=tuple(bias.items())))

    theirs = SequenceBiasLogitsProcessor({(i,): b for i, b in bias.items()})
    assert ours.equal(theirs(torch.tensor([[1]]), logits[None])[0])


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4])
def test_an_end_may_be_the_last_of_min_tokens_one_sooner_than_with_transformers(length):
    logits = random_logits(1, vocabulary=SMALL)[0]

    ours = masked(logits, params(min_tokens=3), prompt=(1, 4), output=[5] * length)

    theirs = MinNewTokensLengthLogitsProcessor(2, 3 - 1, sorted(EOS))
    assert ours.equal(theirs(torch.tensor([[1, 4] + [5] * length]), logits[None])[0])


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_ids_are_held_back_too_and_ignored_ends_are_not(ignore_eos):
    logits = random_logits(1, vocabulary=SMALL)[0]
    sampling = params(min_tokens=2, ignore_eos=ignore_eos, stop_token_ids=frozenset({7}))

    gone = (masked(logits, sampling) == -torch.inf).nonzero().flatten().tolist()

    assert gone == ([7] if ignore_eos else [2, 7, 11])


def test_only_allowed_ids_keep_their_logits_and_a_bias_brings_none_back():
    logits = random_logits(1, vocabulary=SMALL)[0]
    sampling = params(
        allowed_token_ids=frozenset({3, 5, 6}),
        bad_words_ids=((5,),),
        logit_bias=((6, 1.0), (4, 100.0), (5, 100.0)),
    )

    changed = masked(logits, sampling)

    expected = torch.full((SMALL,), -torch.inf)
    expected[3], expected[6] = logits[3], logits[6] + 1
    assert changed.equal(expected)


def test_ids_without_a_logit_are_passed_over():
    logits = random_logits(1, vocabulary=SMALL)[0]
    sampling = params(
        allowed_token_ids=frozenset({3, 4, 999}),
        bad_words_ids=((999,), (999, 4), (1, 999)),
        logit_bias=((999, 5.0),),
        stop_token_ids=frozenset({999}),
        min_tokens=5,
    )

    kept = (masked(logits, sampling) > -torch.inf).nonzero().flatten().tolist()

    assert kept == [3, 4]


@pytest.mark.parametrize(
    "how", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}]
)
def test_a_row_with_nothing_left_is_its_own_failure(how):
    logits = random_logits(3)
    sampling = params(logprobs=2, **how)
    impossible = params(logprobs=2, allowed_token_ids=frozenset({4}), bad_words_ids=((4,),), **how)

    def run(middle):
        chunks = [chunk_of(0, sampling), chunk_of(1, middle), chunk_of(2, sampling)]
        return new_sampler().sample(logits.clone(), chunks)

    with_it, without = run(impossible), run(sampling)

    assert with_it[1].token_id == NOTHING_LEFT
    assert with_it[1].logprobs is None
    assert [with_it[0], with_it[2]] == [without[0], without[2]]
    assert without[1].token_id >= 0


def ids_left(sampling, context, count):
    """The ids that no mask takes."""
    left = set(range(SMALL))
    if sampling.allowed_token_ids is not None:
        left &= sampling.allowed_token_ids
    for *before, last in sampling.bad_words_ids:
        if context[len(context) - len(before) :] == before:
            left.discard(last)
    if count + 1 < sampling.min_tokens:
        left -= EOS | sampling.stop_token_ids
    return left


def changed_score(score, token, sampling, context, output):
    """Bias and penalties of one id."""
    score += dict(sampling.logit_bias).get(token, 0.0)
    if token in context:
        factor = sampling.repetition_penalty
        score = score * factor if score < 0 else score / factor
    times = list(output).count(token)
    return score - sampling.frequency_penalty * times - sampling.presence_penalty * bool(times)


def oracle(logits, sampling, prompt, output):
    """Probabilities by the documented order, one id at a time, in float64."""
    context = [*prompt, *output]
    scores = torch.full((1, SMALL), -torch.inf, dtype=torch.float64)
    for token in ids_left(sampling, context, len(output)):
        scores[0, token] = changed_score(float(logits[token]), token, sampling, context, output)
    scores /= sampling.temperature
    if sampling.min_p:
        chances = scores.softmax(-1)
        scores = scores.masked_fill(chances < sampling.min_p * chances.amax(), -torch.inf)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(-1)[0]


every = st.integers(0, SMALL - 1)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    sampling=st.builds(
        SamplingParams,
        max_tokens=st.just(99),
        temperature=st.sampled_from([0.5, 1.0, 2.0]),
        top_p=st.sampled_from([0.3, 0.83, 1.0]),
        top_k=st.sampled_from([0, 1, 4]),
        min_p=st.sampled_from([0.0, 0.07, 0.5]),
        min_tokens=st.integers(0, 3),
        stop_token_ids=st.frozensets(every, max_size=2),
        repetition_penalty=st.sampled_from([0.8, 1.0, 1.7]),
        presence_penalty=st.sampled_from([-0.6, 0.0, 1.3]),
        frequency_penalty=st.sampled_from([-0.2, 0.0, 0.7]),
        logit_bias=st.dictionaries(every, st.sampled_from([-3.0, 2.0]), max_size=3).map(
            lambda d: tuple(d.items())
        ),
        allowed_token_ids=st.none() | st.frozensets(every, min_size=6),
        bad_words_ids=st.lists(st.lists(every, min_size=1, max_size=3).map(tuple), max_size=3).map(
            tuple
        ),
    ),
    prompt=st.lists(every, min_size=1, max_size=5),
    output=st.lists(every, max_size=5),
)
def test_the_distribution_of_all_together_is_as_documented(seed, sampling, prompt, output):
    logits = random_logits(1, seed=seed, vocabulary=SMALL, scale=2.0)
    expected = oracle(logits[0], sampling, prompt, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "uniform", lambda _seed, choice, _i: (choice + 0.5) / GRID)
        chunks = [
            chunk_of(i, sampling, prompt=prompt, output=output, choice=i) for i in range(GRID)
        ]
        drawn = sampled(new_sampler(GRID, eos_token_ids=EOS), logits.repeat(GRID, 1), chunks)

    if expected.isnan().any():
        assert drawn == [NOTHING_LEFT] * GRID
    else:
        counts = torch.bincount(torch.tensor(drawn), minlength=SMALL)
        assert ((counts - expected * GRID).abs() <= 1 + 1e-3).all()
        assert not counts[expected == 0].any()


@pytest.mark.slow
def test_the_order_of_transformers_gives_the_same_but_for_min_p():
    logits = random_logits(1, vocabulary=SMALL)
    prompt, output = (1, 4, 6), [5, 3]
    sampling = params(
        temperature=0.9,
        top_k=7,
        top_p=0.9,
        min_tokens=4,
        repetition_penalty=1.4,
        logit_bias=((4, 1.5), (9, -1.0)),
        bad_words_ids=((8,), (3, 7)),
    )
    context = torch.tensor([[*prompt, *output]])
    scores = logits.double()
    for processor in (
        SequenceBiasLogitsProcessor({(4,): 1.5, (9,): -1.0}),
        RepetitionPenaltyLogitsProcessor(1.4),
        NoBadWordsLogitsProcessor([[8], [3, 7]]),
        MinNewTokensLengthLogitsProcessor(3, 4, sorted(EOS)),
        TemperatureLogitsWarper(0.9),
        TopKLogitsWarper(7),
        TopPLogitsWarper(0.9),
    ):
        scores = processor(context, scores)

    torch.testing.assert_close(
        oracle(logits[0], sampling, prompt, output), scores.softmax(-1)[0], rtol=1e-6, atol=1e-9
    )
