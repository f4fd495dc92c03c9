"""What is sent and when, decided from a seed."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, pstdev

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.client.load import WORDS, Load, Scale, arrivals, fit, prompts

LOADS = st.builds(
    Load,
    requests=st.integers(1, 40),
    rate=st.floats(0.1, 100),
    burstiness=st.floats(0.2, 20),
    input_len=st.integers(1, 60),
    shared_prefix=st.integers(0, 59),
    seed=st.integers(),
)


@given(LOADS)
def test_a_schedule_ascends_from_zero_and_depends_on_the_seed_alone(load):
    schedule = arrivals(load)

    assert len(schedule) == load.requests
    assert schedule[0] == 0
    assert all(later >= earlier for earlier, later in pairwise(schedule))
    assert schedule == arrivals(attrs.evolve(load, input_len=1, concurrency=3))


@given(LOADS.filter(lambda load: load.requests > 2), st.floats(1.5, 10))
def test_twice_the_rate_is_the_same_schedule_in_half_the_time(load, factor):
    fast = arrivals(attrs.evolve(load, rate=load.rate * factor))

    assert [at * factor for at in fast] == pytest.approx(arrivals(load))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness):
    load = Load(requests=4000, rate=20.0, burstiness=burstiness, seed=1)
    gaps = [later - earlier for earlier, later in pairwise(arrivals(load))]

    assert fmean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.1)


def test_a_closed_loop_has_no_schedule():
    with pytest.raises(ValueError, match="closed loop"):
        arrivals(Load(requests=1))


@given(LOADS, st.integers(0, 3))
def test_prompts_have_their_length_and_share_no_more_than_their_prefix(load, warmup):
    warm, texts = prompts(load, Scale(), warmup=warmup)

    split = [text.split(" ") for text in warm + texts]
    assert (len(warm), len(texts)) == (warmup, load.requests)
    assert {len(words) for words in split} == {load.input_len}
    assert all(words[: load.shared_prefix] == split[0][: load.shared_prefix] for words in split
               if load.shared_prefix < load.input_len)  # fmt: skip
    assert prompts(load, Scale(), warmup=warmup) == (warm, texts)


def test_prompts_differ_after_the_prefix_and_with_the_seed():
    load = Load(requests=50, input_len=30, shared_prefix=20)
    _, texts = prompts(load, Scale())
    _, others = prompts(attrs.evolve(load, seed=1), Scale())

    assert len(set(texts)) == 50
    assert not set(texts) & set(others)


@given(st.integers(0, 200), st.integers(1, 6), st.integers(1, 2000))
def test_a_measured_scale_gives_prompts_of_the_wanted_length(overhead, per_word, words):
    scale = fit((8, overhead + 8 * per_word), (64, overhead + 64 * per_word))

    assert scale.words(overhead + words * per_word) == words
    assert scale.words(1) == 1


@pytest.mark.parametrize("long", [(64, 8), (8, 70), (64, 3)])
def test_a_scale_that_no_tokenizer_has_is_not_believed(long):
    assert fit((8, 8), long) == Scale()


def test_words_are_plain_and_there_are_many():
    assert len(set(WORDS)) > 200
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (Load(requests=1), "closed loop, 1 at once, 64 in / 128 out, seed 0"),
        (
            Load(requests=1, rate=2.5, concurrency=None, shared_prefix=8),
            "open loop, 2.5/s, burstiness 1, 64 in (8 shared) / 128 out, seed 0",
        ),
        (Load(requests=1, rate=2.0, concurrency=4), "open loop, 2/s, burstiness 1, at most 4"),
    ],
)
def test_a_load_describes_itself(load, says):
    assert load.describe().startswith(says)
