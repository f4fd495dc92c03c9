# ruff: noqa: E402 - what needs torch is imported after importorskip
from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.rows import VOCABULARY, chunk_of, new_sampler, random_logits, sampled
from transformers import RepetitionPenaltyLogitsProcessor

from triolet.core import SamplingParams
from triolet.engine.penalties import RowPenalties, penalise

pytestmark = pytest.mark.torch

PROMPT = (5, 9, 5, 640)
OUTPUT = [9, 7, 7, 7, 699]


def params(repetition=1.0, presence=0.0, frequency=0.0, **others):
    return SamplingParams(
        max_tokens=99,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        **{"temperature": 0.0, **others},
    )


def penalised(logits, sampling, prompt=PROMPT, output=OUTPUT):
    row = RowPenalties(chunk_of(0, sampling, prompt=prompt), logits.shape[-1])
    row.count(output)
    changed = logits.clone()[None]
    penalise(changed, [0], [row])
    return changed[0]


def by_hand(logits, sampling, prompt, output):
    """The definitions, one logit at a time."""
    scores = logits.tolist()
    for token in {*prompt, *output}:
        factor = sampling.repetition_penalty
        scores[token] = scores[token] * factor if scores[token] < 0 else scores[token] / factor
    for token in set(output):
        scores[token] -= sampling.frequency_penalty * list(output).count(token)
        scores[token] -= sampling.presence_penalty
    return torch.tensor(scores)


@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0])
def test_repetition_is_that_of_transformers(penalty):
    logits = random_logits(1)[0]

    ours = penalised(logits, params(penalty))

    ids = torch.tensor([[*PROMPT, *OUTPUT]])
    assert ours.equal(RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[None])[0])
    assert int((ours != logits).sum()) == 5


def test_presence_counts_once_and_frequency_each_time_and_neither_the_prompt():
    logits = torch.zeros(VOCABULARY)

    presence = penalised(logits, params(presence=0.5))
    frequency = penalised(logits, params(frequency=0.25))

    assert {int(i): float(presence[i]) for i in presence.nonzero()} == {9: -0.5, 7: -0.5, 699: -0.5}
    assert {int(i): float(frequency[i]) for i in frequency.nonzero()} == {
        9: -0.25,
        7: -0.75,
        699: -0.25,
    }


@pytest.mark.slow
@settings(max_examples=100)
@given(
    seed=st.integers(0, 1000),
    repetition=st.sampled_from([0.7, 1.0, 1.3]),
    presence=st.sampled_from([-2.0, 0.0, 0.4]),
    frequency=st.sampled_from([-0.5, 0.0, 1.1]),
    prompt=st.lists(st.integers(0, 11), min_size=1, max_size=20),
    output=st.lists(st.integers(0, 11), max_size=20),
    steps=st.integers(1, 5),
)
def test_all_of_them_together_and_counted_in_pieces_are_as_defined(
    seed, repetition, presence, frequency, prompt, output, steps
):
    logits = random_logits(1, seed=seed, vocabulary=12)[0]
    sampling = params(repetition, presence, frequency)
    row = RowPenalties(chunk_of(0, sampling, prompt=prompt), 12)
    for end in (*range(0, len(output), steps), len(output)):
        row.count(output[:end])
    changed = logits.clone()[None]

    penalise(changed, [0], [row])

    torch.testing.assert_close(changed[0], by_hand(logits, sampling, prompt, output))


def test_greedy_rows_take_the_best_after_penalties():
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 7], logits[0, 3] = 2.0, 1.5
    sampling = params(presence=1.0)

    assert sampled(new_sampler(), logits.clone(), [chunk_of(0, sampling, output=[4])]) == [7]
    assert sampled(new_sampler(), logits.clone(), [chunk_of(0, sampling, output=[7])]) == [3]


def generate(sampler, logits, steps, sampling):
    """Sample ``steps`` tokens from the same logits."""
    output = []
    for _ in range(steps):
        chunk = chunk_of(0, sampling, name="a", prompt=PROMPT, output=output)
        output += sampled(sampler, logits.clone(), [chunk])
    return output


def test_counting_by_difference_is_counting_afresh():
    logits = random_logits(1, scale=1.0)
    sampling = params(1.3, 0.2, 0.4, temperature=0.8, seed=5)

    by_difference = generate(new_sampler(), logits, 40, sampling)

    for end in range(0, 40, 7):
        chunk = chunk_of(0, sampling, name="a", prompt=PROMPT, output=by_difference[:end])
        assert sampled(new_sampler(), logits.clone(), [chunk]) == [by_difference[end]]


def test_a_sequence_that_lost_its_row_counts_as_one_that_did_not():
    """Preempted, computed again elsewhere, and back in a row that others used meanwhile."""
    logits = random_logits(1, scale=1.0)
    sampling = params(1.3, 0.2, 0.4, temperature=0.8, seed=5)
    stayed = generate(new_sampler(), logits, 20, sampling)
    sampler = new_sampler(3)
    output = []
    for step in range(20):
        chunk = chunk_of(step % 3, sampling, name="a", prompt=PROMPT, output=output)
        output = [*output, *sampled(sampler, logits.clone(), [chunk])]
        if step % 4 == 0:
            stranger = chunk_of((step + 1) % 3, params(2.0), name="b", prompt=(1, 2), output=[3])
            sampler.sample(logits.clone(), [stranger])

    assert output == stayed


def test_another_choice_of_the_request_in_the_row_has_its_own_count():
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 7], logits[0, 3], logits[0, 4] = 2.0, 1.5, 1.2
    sampler, sampling = new_sampler(1), params(presence=1.0)
    first = chunk_of(0, sampling, name="a", output=[7])
    # Longer than the first: as counts go, it could be its continuation.
    second = chunk_of(0, sampling, name="a", output=[3, 3], choice=1)

    assert sampled(sampler, logits.clone(), [first]) == [3]
    assert sampled(sampler, logits.clone(), [second]) == [7]


def test_a_sequence_that_starts_over_in_its_row_is_counted_over():
    logits = random_logits(1, scale=1.0)
    sampler = new_sampler(1)
    sampling = params(1.3, 0.2, 0.4, temperature=0.8, seed=5)
    first = generate(sampler, logits, 9, sampling)

    assert generate(sampler, logits, 9, sampling) == first


def test_rows_without_penalties_beside_rows_with_them_are_left_alone():
    logits = random_logits(4)
    chunks = [
        chunk_of(0, params()),
        chunk_of(1, params(1.5), prompt=PROMPT, output=OUTPUT),
        chunk_of(2, params()),
        chunk_of(3, params(presence=2.0), prompt=PROMPT),  # no output yet: nothing to penalise
    ]
    changed = logits.clone()

    new_sampler().sample(changed, chunks)

    assert changed[[0, 2, 3]].equal(logits[[0, 2, 3]])
    assert changed[1].equal(penalised(logits[1], params(1.5)))


def test_ids_without_a_logit_are_passed_over():
    logits = random_logits(1)[0]
    sampling = params(1.5, 0.3)

    changed = penalised(logits, sampling, prompt=(3, 10**6), output=[VOCABULARY, 4])

    assert changed.equal(penalised(logits, sampling, prompt=(3,), output=[4]))


def test_masked_ids_stay_masked_whatever_the_penalty():
    logits = random_logits(1)[0]
    logits[[7, 9]] = -torch.inf

    for sampling in (params(0.5), params(2.0, -2.0, -2.0)):
        assert penalised(logits, sampling)[[7, 9]].tolist() == [-torch.inf] * 2


def test_neutral_penalties_keep_no_state():
    sampler = new_sampler(2)
    sampler.sample(random_logits(1), [chunk_of(0, params())])

    assert sampler._rows[0].penalties is None
    assert [
        RowPenalties.wanted(attrs.evolve(params(), **{name: 0.5}))
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    ] == [True] * 3
