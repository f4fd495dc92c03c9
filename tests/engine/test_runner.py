# ruff: noqa: E402 - what needs torch is imported after importorskip
from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import attrs
from tests.engine.tiny_models import FAMILIES, Request, build, drive, greedy, prompt

from triolet.core import RequestId, SamplingParams
from triolet.engine.kv import bytes_per_block
from triolet.engine.plan import Chunk, StepPlan
from triolet.engine.runner import build_runner
from triolet.engine.sampler import NonFiniteLogitsError

pytestmark = pytest.mark.torch

NEW = 24
LENGTHS = (21, 1, 34, 5, 13)
BLOCKS = 400


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@attrs.frozen(eq=False)
class Subject:
    runner: object
    model: object
    #: By length of the prompt: what model.generate makes of it, greedily.
    expected: dict[int, list[int]]


@pytest.fixture(scope="session")
def subjects():
    """By family: a runner, and what transformers itself generates. Built on first use."""
    built = {}

    def get(family):
        if family not in built:
            model = build(family)
            expected = {n: generate(model, prompt(n)) for n in LENGTHS}
            runner = build_runner(model, num_blocks=BLOCKS, block_size=4, max_num_seqs=64)
            built[family] = Subject(runner=runner, model=model, expected=expected)
        return built[family]

    return get


@pytest.fixture(params=FAMILIES)
def subject(request, subjects):
    return subjects(request.param)


@pytest.fixture
def llama(subjects):
    return subjects("llama")


def generate(model, ids):
    tensor = torch.tensor([ids])
    out = model.generate(
        tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=NEW, do_sample=False
    )
    return out[0, len(ids) :].tolist()


def chunk_of(request_id="a", *, token_ids=(5, 6, 7), start=0, blocks=(0, 1), samples=True, row=0):
    return Chunk(
        request_id=RequestId(request_id),
        row=row,
        token_ids=token_ids,
        start=start,
        blocks=blocks,
        samples=samples,
        sampling=greedy(1),
        output_index=0,
    )


@pytest.mark.slow
def test_greedy_output_is_that_of_transformers(subject):
    for length in LENGTHS:
        [output] = drive(
            subject.runner, [Request("a", prompt(length), greedy(NEW))], num_blocks=BLOCKS
        )

        assert output == subject.expected[length]


def test_the_expected_outputs_are_worth_comparing(subject):
    """Random weights can produce one token for ever, whatever the attention does."""
    assert len(subject.expected[21]) == NEW
    assert len(set(subject.expected[21])) > NEW // 3
    assert subject.expected[21] != subject.expected[34]


@pytest.mark.slow
def test_greedy_output_does_not_change_beside_strangers(subject):
    requests = [
        Request(f"{n}", prompt(n), greedy(NEW), chunk=7, delay=3 * i) for i, n in enumerate(LENGTHS)
    ]

    outputs = drive(subject.runner, requests, num_blocks=BLOCKS)

    assert outputs == [subject.expected[n] for n in LENGTHS]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_greedy_output_does_not_depend_on_the_chunks_of_the_prompt(subject, seed):
    requests = [Request(f"{c}", prompt(21), greedy(NEW), chunk=c) for c in range(1, 22)]

    outputs = drive(subject.runner, requests, num_blocks=BLOCKS, seed=seed)

    assert outputs == [subject.expected[21]] * 21


@pytest.mark.slow
def test_a_seeded_request_samples_the_same_tokens_whatever_it_is_batched_with(llama):
    def seeded(seed):
        sampling = SamplingParams(max_tokens=NEW, temperature=0.9, top_p=0.95, seed=seed)
        return Request(f"seed {seed}", prompt(13), sampling)

    [alone] = drive(llama.runner, [seeded(7)], num_blocks=BLOCKS)
    strangers = [Request(f"{n}", prompt(n), greedy(NEW), delay=n % 4) for n in LENGTHS]
    together = drive(llama.runner, [*strangers, seeded(7), seeded(8)], num_blocks=BLOCKS)

    assert together[-2] == alone
    assert together[-1] != alone


def test_a_step_that_samples_nothing_returns_nothing(llama):
    assert llama.runner.run(StepPlan(chunks=(chunk_of(samples=False),))) == []
    assert llama.runner.run(StepPlan(chunks=())) == []


def test_tokens_come_in_the_order_of_the_chunks(llama):
    """Decode rows are computed first, wherever they stand in the plan."""
    ids = prompt(13)
    long = chunk_of("long", token_ids=ids, blocks=(0, 1, 2, 3), row=1)
    silent = chunk_of("silent", token_ids=prompt(5), blocks=(4, 5), row=2, samples=False)
    short = chunk_of("short", token_ids=prompt(1), blocks=(6,), row=3)

    tokens = llama.runner.run(StepPlan(chunks=(long, silent, short)))

    assert tokens == [llama.expected[13][0], llama.expected[1][0]]


def test_numbers_that_are_not_finite_name_their_request_and_a_reset_heals_the_runner():
    model = build("llama")
    healthy = generate(model, prompt(5))[0]
    runner = build_runner(model, num_blocks=4, block_size=4, max_num_seqs=2)
    weight = model.get_input_embeddings().weight
    bad = chunk_of("bad", token_ids=(9,), blocks=(0,))
    good = chunk_of("good", token_ids=prompt(5), blocks=(1, 2), row=1)
    assert 9 not in prompt(5)
    with torch.no_grad():
        saved = weight[9].clone()
        weight[9] = torch.nan

    with pytest.raises(NonFiniteLogitsError) as caught:
        runner.run(StepPlan(chunks=(bad, good)))
    assert caught.value.request_ids == ("bad",)

    with torch.no_grad():
        weight[9] = saved
    runner.reset()
    reuse = chunk_of("new", token_ids=prompt(5), blocks=(0, 1))
    assert runner.run(StepPlan(chunks=(reuse,))) == [healthy]


def test_reset_forgets_what_the_pool_held(llama):
    ids = prompt(13)
    first = chunk_of(token_ids=ids[:12], blocks=(0, 1, 2), samples=False)
    last = chunk_of(token_ids=ids[12:], start=12, blocks=(0, 1, 2, 3))
    llama.runner.run(StepPlan(chunks=(first,)))
    assert llama.runner.run(StepPlan(chunks=(last,))) == [llama.expected[13][0]]

    llama.runner.reset()

    assert llama.runner.run(StepPlan(chunks=(last,))) != [llama.expected[13][0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_costs_what_the_pool_allocates(dtype):
    model = build("gemma3", dtype=dtype)
    runner = build_runner(model, num_blocks=6, block_size=16, max_num_seqs=2)
    pool = runner._pool
    allocated = sum(t.numel() * t.element_size() for t in (*pool.key_pages, *pool.value_pages))

    assert allocated == 6 * bytes_per_block(model.config, block_size=16, dtype=dtype)
