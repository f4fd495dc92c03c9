# ruff: noqa: E402 - what needs torch is imported after importorskip
from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.rows import VOCABULARY, chunk_of, new_sampler, random_logits

from triolet.core import SamplingParams
from triolet.engine import logprobs as logprobs_module
from triolet.engine import ranking
from triolet.engine.plan import NOT_FINITE, Sample

pytestmark = pytest.mark.torch


def params(k=5, **options):
    return SamplingParams(**{"max_tokens": 9, "logprobs": k, **options})


def check(entry, logits, k):
    """Against log_softmax and a stable sort of the raw logits, in float64."""
    logprobs = logits.double().log_softmax(-1)
    order = logits.sort(descending=True, stable=True).indices
    assert entry.logprob == pytest.approx(float(logprobs[entry.token_id]), abs=1e-6)
    assert entry.rank == 1 + int((logits > logits[entry.token_id]).sum())
    assert [i for i, _ in entry.top] == order[:k].tolist()
    assert [p for _, p in entry.top] == pytest.approx(logprobs[order[:k]].tolist(), abs=1e-6)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    coarse=st.booleans(),
    half=st.booleans(),
    vocabulary=st.sampled_from([3, 20, 85, VOCABULARY]),
    tops=st.lists(st.integers(0, 20), min_size=1, max_size=5),
)
def test_they_are_log_softmax_and_a_stable_sort(seed, coarse, half, vocabulary, tops):
    logits = random_logits(len(tops), seed=seed, vocabulary=vocabulary)
    logits = logits.round() if coarse else logits
    logits = logits.bfloat16() if half else logits
    chunks = [chunk_of(i, params(k, temperature=i / 2, seed=seed)) for i, k in enumerate(tops)]

    samples = new_sampler().sample(logits.clone(), chunks)

    for sample, row, k in zip(samples, logits.float(), tops, strict=True):
        assert sample.logprobs.token_id == sample.token_id
        assert len(sample.logprobs.top) == min(k, vocabulary)
        check(sample.logprobs, row, k)


def test_rows_are_sorted_only_where_ties_could_reach_beyond_the_ones_looked_at(monkeypatch):
    sizes = []
    monkeypatch.setattr(
        logprobs_module,
        "largest",
        lambda logits, count: (sizes.append((len(logits), count)), ranking.largest(logits, count))[
            1
        ],
    )
    logits = random_logits(3)
    logits[1] = torch.arange(VOCABULARY) % 7  # a hundred ids share each place

    samples = new_sampler().sample(logits, [chunk_of(i, params()) for i in range(3)])

    assert sizes == [(3, 69), (1, VOCABULARY)]
    assert [i for i, _ in samples[1].logprobs.top] == [6, 13, 20, 27, 34]


def test_they_are_of_the_raw_distribution():
    logits = random_logits(2)
    heavy = params(
        temperature=0.3,
        top_k=2,
        repetition_penalty=3.0,
        presence_penalty=2.0,
        logit_bias=((3, 50.0),),
        bad_words_ids=((int(logits[1].argmax()),),),
    )

    samples = new_sampler().sample(
        logits.clone(), [chunk_of(0, params(None)), chunk_of(1, heavy, output=[5, 6])]
    )

    assert samples[0].logprobs is None
    assert samples[1].token_id == 3
    check(samples[1].logprobs, logits[1], 5)
    assert samples[1].logprobs.top[0][0] == int(logits[1].argmax())


def test_a_token_whose_nucleus_needed_a_sort_has_its_own_logprob():
    """Its first choice, from too few candidates, was not its last."""
    logits = random_logits(8)
    chunks = [chunk_of(i, params(temperature=50.0, top_p=0.9, seed=i)) for i in range(8)]

    samples = new_sampler().sample(logits.clone(), chunks)

    for sample, row in zip(samples, logits, strict=True):
        check(sample.logprobs, row, 5)
    assert len({sample.token_id for sample in samples}) > 4


def test_asking_for_them_changes_no_token():
    logits = random_logits(6)
    options = [
        {"temperature": 0.0},
        {"seed": 1},
        {"top_p": 0.9},
        {"min_p": 0.1, "seed": 3},
        {"repetition_penalty": 1.5},
        {"temperature": 40.0, "top_p": 0.95},
    ]

    def ids(k):
        chunks = [chunk_of(i, params(k, **o), output=[9]) for i, o in enumerate(options)]
        return [s.token_id for s in new_sampler().sample(logits.clone(), chunks)]

    assert ids(7) == ids(None)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**20), st.permutations(range(6)), st.integers(1, 6))
def test_they_do_not_depend_on_the_batch(seed, order, count):
    logits = random_logits(6, seed=seed)
    chunks = [
        chunk_of(i, params(k, presence_penalty=i % 2, seed=seed), output=[i])
        for i, k in enumerate((None, 0, 1, 5, 20, 3))
    ]
    alone = [
        new_sampler().sample(logits[i : i + 1].clone(), [chunk])[0]
        for i, chunk in enumerate(chunks)
    ]
    picked = order[:count]

    together = new_sampler().sample(logits[picked], [chunks[i] for i in picked])

    assert together == [alone[i] for i in picked]


def test_no_more_are_reported_than_the_server_allows():
    sampler = new_sampler(max_logprobs=3)
    chunks = [chunk_of(0, params(20)), chunk_of(1, params(2))]

    samples = sampler.sample(random_logits(2), chunks)

    assert [len(sample.logprobs.top) for sample in samples] == [3, 2]


def test_an_id_that_the_model_rules_out_is_minus_infinity_and_nothing_is_nan():
    logits = torch.full((1, VOCABULARY), -torch.inf)
    logits[0, 600], logits[0, 3] = 1.0, 0.0

    [sample] = new_sampler().sample(logits, [chunk_of(0, params(4, temperature=0.0))])

    assert sample.logprobs.logprob == pytest.approx(-math.log1p(math.exp(-1)))
    assert [i for i, _ in sample.logprobs.top] == [600, 3, 0, 1]
    assert [p for _, p in sample.logprobs.top[2:]] == [-math.inf] * 2


def test_a_number_that_is_not_finite_shows_even_where_a_mask_hides_it():
    logits = random_logits(2)
    logits[1, 7] = torch.nan
    sampling = params(1, allowed_token_ids=frozenset({3, 4}))

    good, bad = new_sampler().sample(logits, [chunk_of(0, sampling), chunk_of(1, sampling)])

    assert bad == Sample(NOT_FINITE)
    assert good.token_id in {3, 4}
    assert math.isfinite(good.logprobs.logprob)
