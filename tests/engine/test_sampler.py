# ruff: noqa: E402 - what needs torch is imported after importorskip
from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.rows import VOCABULARY, chunk_of, new_sampler, random_logits, sampled
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triolet.core import SamplingParams
from triolet.engine import inversion
from triolet.engine import sampler as sampler_module
from triolet.engine.plan import NOT_FINITE
from triolet.engine.sampler import uniform

pytestmark = pytest.mark.torch

GRID = 2048


def params(temperature=1.0, top_k=0, top_p=1.0, seed=0, min_p=0.0):
    return SamplingParams(
        max_tokens=9, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, min_p=min_p
    )


def warped(logits, sampling):
    """Probabilities by transformers' own warpers, in float64."""
    scores = logits.double()[None]
    scores = TemperatureLogitsWarper(float(sampling.temperature))(None, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(-1)[0]


def frequencies(logits, sampling):
    """How often each id is drawn when the uniform numbers are an even grid over [0, 1)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "uniform", lambda _seed, _choice, i: (i + 0.5) / GRID)
        counts = torch.zeros(len(logits), dtype=torch.float64)
        for begin in range(0, GRID, 256):
            chunks = [chunk_of(i, sampling, index=begin + i) for i in range(256)]
            ids = sampled(new_sampler(256), logits.repeat(256, 1), chunks)
            counts += torch.bincount(torch.tensor(ids), minlength=len(logits))
    return counts


CASES = [
    params(),
    params(temperature=0.3),
    params(temperature=1.7),
    params(top_k=1),
    params(top_k=40),
    params(top_k=VOCABULARY),
    params(top_k=10**6),
    params(top_k=300),  # beyond the candidates
    params(top_p=0.5),
    params(top_p=0.95),
    params(top_p=1e-9),
    params(temperature=5.0, top_p=0.99),  # a nucleus beyond the candidates
    params(temperature=0.8, top_k=50, top_p=0.9),
    params(temperature=5.0, top_k=400, top_p=0.97),
    params(min_p=0.05),
    params(min_p=1.0),
    params(temperature=4.0, min_p=0.02),  # more than the candidates
    params(temperature=4.0, min_p=0.02, top_p=0.9),
    params(temperature=0.7, min_p=0.1, top_k=5),
    params(temperature=3.0, min_p=0.3, top_k=50, top_p=0.8),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", CASES, ids=lambda s: f"T{s.temperature} k{s.top_k} p{s.top_p} m{s.min_p}"
)
def test_the_distribution_is_that_of_transformers_warpers(sampling):
    logits = random_logits(1)[0]

    counts, expected = frequencies(logits, sampling), warped(logits, sampling)

    # An interval of length q holds q * GRID points of the grid, give or take one.
    assert ((counts - expected * GRID).abs() <= 1 + 1e-3).all()
    assert not counts[expected == 0].any()
    assert counts[expected * GRID > 1].all()


@pytest.mark.slow
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    vocabulary=st.sampled_from([2, 5, 255, 256, 257, 700]),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, 500),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_what_is_drawn_is_what_transformers_keeps(
    seed, vocabulary, scale, temperature, top_k, top_p, min_p
):
    logits = random_logits(1, seed=seed, vocabulary=vocabulary, scale=scale)[0]
    sampling = params(temperature, top_k, top_p, seed, min_p)
    chunks = [chunk_of(i, sampling, index=i) for i in range(64)]

    ids = sampled(new_sampler(), logits.expand(64, -1), chunks)

    assert (warped(logits, sampling)[ids] > 0).all()


@pytest.mark.slow
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    candidates=st.sampled_from([1, 2, 17, 256, VOCABULARY]),
    coarse=st.booleans(),
)
def test_the_slow_path_and_the_fast_one_choose_the_same(seed, candidates, coarse):
    logits = random_logits(36, seed=seed)
    if coarse:
        # Ties everywhere, the edge of the candidates included.
        logits = logits.round()
    kinds = itertools.product([0.5, 1.0], [0, 3, 17, 30, 256, 650], [0.3, 0.9, 0.999])
    chunks = [chunk_of(i, params(*kind, seed=seed), index=i) for i, kind in enumerate(kinds)]

    def choose(count):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampler_module, "CANDIDATES", count)
            return sampled(new_sampler(), logits, chunks)

    assert choose(candidates) == choose(VOCABULARY)


def test_what_a_mask_leaves_is_not_sorted_for(monkeypatch):
    """What lies beyond the candidates is impossible there, not unknown."""
    sizes = []
    largest = sampler_module.largest
    monkeypatch.setattr(
        sampler_module,
        "largest",
        lambda logits, count: (sizes.append(count), largest(logits, count))[1],
    )
    few = SamplingParams(
        max_tokens=1, top_k=40, top_p=0.99, allowed_token_ids=frozenset({3, 600, 601})
    )

    new_sampler().sample(
        random_logits(2), [chunk_of(0, few), chunk_of(1, params(9.0, top_k=30, min_p=0.9))]
    )

    assert sizes == [256]


def test_rows_are_sorted_only_where_the_candidates_do_not_reach(monkeypatch):
    sizes = []
    largest = sampler_module.largest
    monkeypatch.setattr(
        sampler_module,
        "largest",
        lambda logits, count: (sizes.append((len(logits), count)), largest(logits, count))[1],
    )
    logits = random_logits(4)
    chunks = [
        chunk_of(0, params(top_p=0.9)),
        chunk_of(1, params(temperature=50.0, top_p=0.9)),
        chunk_of(2, params(top_k=20)),
        chunk_of(3, params()),
    ]

    new_sampler().sample(logits, chunks)

    assert sizes == [(3, 256), (1, VOCABULARY)]


@pytest.mark.parametrize("vocabulary", [5, 256, 257, 1000, 49152])
@pytest.mark.parametrize("rows", [1, 7])
def test_greedy_takes_the_lowest_of_equal_ids(rows, vocabulary):
    logits = random_logits(rows, vocabulary=vocabulary)
    places = torch.randint(0, vocabulary, (rows, 3), generator=torch.Generator().manual_seed(1))
    logits.scatter_(1, places, 50.0)
    chunks = [chunk_of(i, params(temperature=0.0)) for i in range(rows)]

    assert sampled(new_sampler(), logits, chunks) == places.min(1).values.tolist()


@pytest.mark.slow
def test_ties_with_the_kth_are_all_kept():
    logits = torch.full((VOCABULARY,), -9.0)
    logits[[3, 60, 500]] = 1.0
    logits[8] = 2.0
    sampling = params(top_k=2)

    counts = frequencies(logits, sampling)

    assert counts.nonzero().flatten().tolist() == [3, 8, 60, 500]
    assert ((counts - warped(logits, sampling) * GRID).abs() <= 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("candidates", [4, 256])
@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 5), (0.55, 6)])
def test_of_tied_tokens_a_nucleus_keeps_the_lowest_ids(monkeypatch, candidates, top_p, kept):
    """As many as it takes to reach the share, and not one more where it is reached exactly."""
    monkeypatch.setattr(sampler_module, "CANDIDATES", candidates)
    tied = [3, 60, 500, 501, 502, 503, 504, 505, 506, 507]
    logits = torch.full((VOCABULARY,), -90.0)
    logits[tied] = 1.0

    counts = frequencies(logits, params(top_p=top_p))

    assert counts.nonzero().flatten().tolist() == tied[:kept]


def test_a_token_that_cannot_be_is_never_drawn():
    """At the very ends of [0, 1), where rounding might walk off the distribution."""
    logits = torch.full((VOCABULARY,), -torch.inf)
    logits[300:303] = torch.tensor([1e-3, 0.7, 1e-9])
    ends = [0.0, 1 - 2.0**-53]
    for sampling, end in itertools.product(CASES, ends):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampler_module, "uniform", lambda *_, end=end: end)
            [token] = sampled(new_sampler(), logits[None], [chunk_of(0, sampling)])
        assert token in {300, 301, 302}


def test_a_target_at_the_end_of_the_distribution_finds_the_last_token_with_weight():
    """Two sums of the same weights can differ in the last bit."""
    cumulative = torch.tensor([[0.0, 0.5, 1.5, 1.5, 1.5]], dtype=torch.float64)
    for target in (1.4, 1.5, 1.6):
        place = inversion._position(cumulative, torch.full((1, 1), target).double())
        assert place.item() == 2


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_temperature_close_to_zero_is_greedy(temperature, top_p):
    logits = random_logits(8)
    chunks = [chunk_of(i, params(temperature, top_p=top_p, seed=i)) for i in range(8)]

    assert sampled(new_sampler(), logits, chunks) == logits.argmax(-1).tolist()


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(0, 2**32), st.permutations(range(len(CASES))), st.integers(1, len(CASES)))
def test_a_token_does_not_depend_on_the_batch(seed, order, count):
    logits = random_logits(len(CASES), seed=seed)
    chunks = [chunk_of(i, s, index=i) for i, s in enumerate(CASES)]
    alone = [sampled(new_sampler(), logits[i : i + 1], [c])[0] for i, c in enumerate(chunks)]
    picked = order[:count]

    together = sampled(new_sampler(), logits[picked], [chunks[i] for i in picked])

    assert together == [alone[i] for i in picked]


def test_a_row_that_changes_hands_takes_the_new_parameters():
    sampler = new_sampler(2)
    logits = random_logits(1)
    best = int(logits.argmax())
    wild = [
        sampled(sampler, logits, [chunk_of(1, params(9.0, top_p=0.99), name="a", index=i)])[0]
        for i in range(20)
    ]
    tame = [
        sampled(sampler, logits, [chunk_of(1, params(9.0, top_k=1), name="b", index=i)])[0]
        for i in range(20)
    ]

    assert len(set(wild)) > 10
    assert tame == [best] * 20


def test_parameters_are_written_once_per_request(monkeypatch):
    sampler = new_sampler(2)
    written = []
    original = sampler._index
    monkeypatch.setattr(sampler, "_index", lambda ids: (written.append(ids), original(ids))[1])
    sampling = params(0.0)
    for index in range(3):
        sampler.sample(random_logits(1), [chunk_of(1, sampling, index=index)])

    assert written == [[1]]


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampling", [params(0.0), params(), params(top_k=5), params(top_p=0.5)])
def test_a_row_without_finite_logits_is_marked_and_changes_no_other(number, sampling):
    logits = random_logits(3)
    chunks = [chunk_of(i, sampling) for i in range(3)]
    expected = sampled(new_sampler(), logits.clone(), chunks)
    logits[1, 77] = number

    assert sampled(new_sampler(), logits, chunks) == [expected[0], NOT_FINITE, expected[2]]


def test_half_precision_logits_are_sampled_too():
    logits = random_logits(2).bfloat16()
    chunks = [chunk_of(0, params(0.0)), chunk_of(1, params(0.7, top_p=0.9, seed=4))]

    ids = sampled(new_sampler(), logits, chunks)

    assert ids == sampled(new_sampler(), logits.float(), chunks)
    assert new_sampler().sample(logits[:0], []) == []


def test_the_uniform_numbers_are_uniform_and_differ_by_each_argument():
    numbers = torch.tensor(
        [uniform(s, c, i) for s in (0, 1, 2**64 - 1) for c in (0, 1) for i in range(3000)],
        dtype=torch.float64,
    )
    bins = torch.histc(numbers, bins=50, min=0, max=1)
    expected = len(numbers) / 50

    assert len(numbers.unique()) == len(numbers)
    # Chi-square with 49 degrees of freedom: 85 is its 99.9 % quantile.
    assert float(((bins - expected) ** 2 / expected).sum()) < 85


def test_the_uniform_numbers_are_part_of_the_interface():
    """A client that repeats a seed under a later version expects the same answer."""
    assert [uniform(0, 0, 0), uniform(42, 1, 7)] == [
        0.6326819898844135,
        0.4988181472708805,
    ]


def test_each_choice_of_a_request_has_noise_of_its_own():
    sampling = params(5.0, seed=3)
    logits = random_logits(1).repeat(8, 1)
    chunks = [chunk_of(i, sampling, name="a", choice=i, index=7) for i in range(8)]

    ids = sampled(new_sampler(), logits, chunks)

    weights = (logits[0].double() / 5.0).softmax(-1).cumsum(-1)
    noise = torch.tensor([uniform(3, i, 7) for i in range(8)], dtype=torch.float64)
    assert ids == torch.searchsorted(weights, noise, right=True).tolist()
    assert len(set(ids)) > 4


def test_a_request_that_takes_the_name_of_an_earlier_one_takes_its_own_parameters():
    sampler = new_sampler(1)
    logits = random_logits(1)
    sampler.sample(logits, [chunk_of(0, params(0.0))])

    ids = {
        sampled(sampler, logits, [chunk_of(0, params(9.0, seed=i))])[0]  # the same name each time
        for i in range(20)
    }

    assert len(ids) > 10
