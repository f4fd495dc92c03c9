# ruff: noqa: E402 - what needs torch is imported after importorskip
from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

import attrs
from tests.engine.tiny_models import FAMILIES, Request, build, drive, greedy, prompt

from triolet.core import EngineRequest, RequestId, SamplingParams
from triolet.engine import prompt_scores as prompt_scores_module
from triolet.engine.blocks import BlockPool
from triolet.engine.kv import bytes_per_block
from triolet.engine.loop import Engine
from triolet.engine.plan import NOT_FINITE, Chunk, StepPlan, StepSamples
from triolet.engine.runner import build_runner
from triolet.engine.scheduler import Scheduler

pytestmark = pytest.mark.torch

NEW = 24
LENGTHS = (21, 1, 34, 5, 13)
BLOCKS = 400
#: In no prompt of these lengths, nor in what the tiny llama makes of them.
POISON = 2


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@attrs.frozen(eq=False)
class Subject:
    runner: object
    model: object
    #: The same model under transformers' own attention.
    reference: object
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
            built[family] = Subject(
                runner=runner, model=model, reference=build(family), expected=expected
            )
        return built[family]

    return get


@pytest.fixture(params=FAMILIES)
def subject(request, subjects):
    return subjects(request.param)


@pytest.fixture
def llama(subjects):
    return subjects("llama")


def generate(model, ids, **options):
    tensor = torch.tensor([ids])
    out = model.generate(
        tensor,
        attention_mask=torch.ones_like(tensor),
        max_new_tokens=NEW,
        do_sample=False,
        **options,
    )
    return out[0, len(ids) :].tolist()


def tokens_of(runner, *chunks):
    return [sample.token_id for sample in runner.run(StepPlan(chunks=chunks)).samples]


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
    nothing = StepSamples(samples=())

    assert llama.runner.run(StepPlan(chunks=(chunk_of(samples=False),))) == nothing
    assert llama.runner.run(StepPlan(chunks=())) == nothing


def test_tokens_come_in_the_order_of_the_chunks(llama):
    """Decode rows are computed first, wherever they stand in the plan."""
    ids = prompt(13)
    long = chunk_of("long", token_ids=ids, blocks=(0, 1, 2, 3), row=1)
    silent = chunk_of("silent", token_ids=prompt(5), blocks=(4, 5), row=2, samples=False)
    short = chunk_of("short", token_ids=prompt(1), blocks=(6,), row=3)

    tokens = tokens_of(llama.runner, long, silent, short)

    assert tokens == [llama.expected[13][0], llama.expected[1][0]]


@pytest.fixture
def poisoned(llama):
    """A runner whose model computes NaN wherever POISON is in the prompt."""
    assert POISON not in {i for n in LENGTHS for i in (*prompt(n), *llama.expected[n])}
    model = build("llama")
    runner = build_runner(model, num_blocks=16, block_size=4, max_num_seqs=4)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    return runner


def test_numbers_that_are_not_finite_are_those_of_their_request_alone(poisoned, llama):
    bad = chunk_of("bad", token_ids=(POISON,), blocks=(0,))
    good = chunk_of("good", token_ids=prompt(5), blocks=(1, 2), row=1)
    reuse = chunk_of("new", token_ids=prompt(5), blocks=(2, 0))

    assert tokens_of(poisoned, bad, good) == [NOT_FINITE, llama.expected[5][0]]
    assert tokens_of(poisoned, reuse) == [llama.expected[5][0]]


def test_a_lone_token_of_a_prompt_is_looked_at_however_long_the_prompt_is(poisoned):
    bad = chunk_of("bad", token_ids=(POISON,), start=5, blocks=(0, 1), samples=False)
    good = chunk_of("good", token_ids=(5,), start=1, blocks=(2,), row=1)

    assert poisoned.run(StepPlan(chunks=(bad, good))).unsound_prompts == {"bad"}


@pytest.mark.slow
@pytest.mark.parametrize("aborted", [False, True], ids=["sampled", "aborted in its prompt"])
def test_a_request_of_bad_numbers_fails_and_others_on_its_blocks_do_not_notice(
    poisoned, llama, aborted, caplog
):
    scheduler = Scheduler(BlockPool(16, 4), 4, 16, 64, frozenset())
    engine = Engine(scheduler, poisoned)
    got = {n: [] for n in LENGTHS}
    failed = []

    def step():
        result = engine.step()
        failed.extend(failure.request_id for failure in result.failures)
        for output in result.outputs:
            got[int(output.request_id)] += output.token_ids

    bad = EngineRequest(RequestId("bad"), (POISON, *prompt(34)), greedy(NEW), n=2)
    for n in LENGTHS:
        engine.add(EngineRequest(RequestId(str(n)), prompt(n), greedy(NEW)))
        engine.add(attrs.evolve(bad, id=RequestId(f"bad {n}")))
        for _ in range(2):
            step()
        if aborted:
            engine.abort(RequestId(f"bad {n}"))
    while engine.has_work:
        step()

    assert got == {n: llama.expected[n] for n in LENGTHS}
    # With little to do beside it, the first one gets so far that its numbers show.
    assert failed == (["bad 21"] if aborted else [f"bad {n}" for n in LENGTHS])
    assert engine.statistics().used_blocks == engine.statistics().used_rows == 0


def test_reset_forgets_what_the_pool_held(llama):
    ids = prompt(13)
    first = chunk_of(token_ids=ids[:12], blocks=(0, 1, 2), samples=False)
    last = chunk_of(token_ids=ids[12:], start=12, blocks=(0, 1, 2, 3))
    llama.runner.run(StepPlan(chunks=(first,)))
    assert tokens_of(llama.runner, last) == [llama.expected[13][0]]

    llama.runner.reset()

    assert tokens_of(llama.runner, last) != [llama.expected[13][0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_costs_what_the_pool_allocates(dtype):
    model = build("gemma3", dtype=dtype)
    runner = build_runner(model, num_blocks=6, block_size=16, max_num_seqs=2)
    pool = runner._pool
    allocated = sum(t.numel() * t.element_size() for t in (*pool.key_pages, *pool.value_pages))

    assert allocated == 6 * bytes_per_block(model.config, block_size=16, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_greedy_output_under_a_repetition_penalty_is_that_of_transformers(subjects, family):
    """With chunks, strangers and rows that change hands."""
    subject = subjects(family)
    sampling = SamplingParams(max_tokens=NEW, temperature=0.0, repetition_penalty=1.5)
    requests = [
        Request(f"{n}", prompt(n), sampling, chunk=7, delay=2 * i) for i, n in enumerate(LENGTHS)
    ]
    requests.append(Request("plain", prompt(21), greedy(NEW)))

    outputs = drive(subject.runner, requests, num_blocks=BLOCKS)

    expected = [generate(subject.reference, prompt(n), repetition_penalty=1.5) for n in LENGTHS]
    assert outputs == [*expected, subject.expected[21]]
    assert expected[0] != subject.expected[21]


@pytest.mark.slow
def test_ends_are_held_back_until_min_tokens(subjects):
    llama = subjects("llama")
    end = llama.expected[21][0]
    runner = build_runner(
        build("llama"), num_blocks=16, block_size=4, max_num_seqs=2, eos_token_ids=frozenset({end})
    )
    sampling = SamplingParams(max_tokens=NEW, temperature=0.0, min_tokens=6)

    [output] = drive(runner, [Request("a", prompt(21), sampling)], num_blocks=16)

    assert end not in output[:6]
    expected = generate(llama.reference, prompt(21), eos_token_id=end, min_new_tokens=6)
    assert output[: len(expected)] == expected


def check_logprobs(entries, targets, logits, k):
    logprobs = logits.double().log_softmax(-1)
    assert [entry.token_id for entry in entries] == list(targets)
    for entry, row in zip(entries, logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        top = row.sort(descending=True, stable=True)
        assert [i for i, _ in entry.top] == top.indices[:k].tolist()
        assert [p for _, p in entry.top] == pytest.approx(top.values[:k].tolist(), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("bytes_at_once", [prompt_scores_module.PIECE_BYTES, 5 * 512 * 4, 1])
def test_logprobs_of_prompt_and_output_are_those_of_a_full_forward(
    subject, monkeypatch, bytes_at_once
):
    """In every chunking, in pieces, and beside others that ask for nothing."""
    monkeypatch.setattr(prompt_scores_module, "PIECE_BYTES", bytes_at_once)
    ids = prompt(21)
    sampling = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3, prompt_logprobs=5)
    requests = [Request(f"{c}", ids, sampling, chunk=c) for c in (1, 2, 3, 7, 20, 21)]
    requests.append(Request("plain", prompt(13), greedy(NEW), delay=1))

    drive(subject.runner, requests, num_blocks=BLOCKS)

    full = (*ids, *requests[0].output)
    with torch.no_grad():
        logits = subject.reference(input_ids=torch.tensor([full]), use_cache=False).logits[0]
    for request in requests[:-1]:
        check_logprobs(request.prompt_logprobs, ids[1:], logits[:20], 5)
        check_logprobs(request.logprobs, full[21:], logits[20:24], 3)
    assert requests[-1].output == subject.expected[13]
    assert requests[-1].logprobs == [None] * NEW


def scoring(name="a", **options):
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    return attrs.evolve(chunk_of(name, **options), sampling=sampling, scores_prompt=True)


def test_a_prompt_is_scored_up_to_its_last_token_and_no_further(llama):
    ids = prompt(5)
    whole = attrs.evolve(scoring(token_ids=ids), prompt_ids=ids)
    # Computed again after it lost its KV: one output token follows the prompt.
    again = attrs.evolve(
        scoring("b", token_ids=(*ids, 9), blocks=(2, 3), row=1), prompt_ids=ids, output_ids=[9]
    )
    single = attrs.evolve(scoring("c", token_ids=ids[:1], blocks=(4,), row=2), prompt_ids=ids[:1])

    result = llama.runner.run(StepPlan(chunks=(whole, again, single)))

    scored = [[e.token_id for e in result.prompt_logprobs[i]] for i in range(3)]
    assert scored == [list(ids[1:]), list(ids[1:]), []]
    assert len(result.samples) == 3


def test_a_long_prompt_goes_through_the_layers_once_and_the_model_is_as_it_was(llama, monkeypatch):
    monkeypatch.setattr(prompt_scores_module, "PIECE_BYTES", 1)
    layer, head = llama.model.model.layers[0], llama.model.lm_head
    calls = []
    hooks = [
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
        for name, module in (("layer", layer), ("head", head))
    ]
    ids = prompt(5)
    before = dict(vars(llama.model.model))

    llama.runner.run(StepPlan(chunks=(attrs.evolve(scoring(token_ids=ids), prompt_ids=ids),)))

    for hook in hooks:
        hook.remove()
    assert calls == ["layer"] + ["head"] * 4
    assert vars(llama.model.model) == before


def test_a_prompt_with_numbers_that_are_not_finite_names_its_request(poisoned):
    bad = attrs.evolve(
        scoring("bad", token_ids=(5, POISON), blocks=(0,), samples=False), prompt_ids=(5, POISON, 7)
    )
    good = attrs.evolve(scoring("good", token_ids=(5, 6), blocks=(1,), row=1), prompt_ids=(5, 6))

    result = poisoned.run(StepPlan(chunks=(bad, good)))

    assert result.unsound_prompts == {"bad"}
    assert [sample.token_id >= 0 for sample in result.samples] == [True]
    assert all(math.isfinite(scored.logprob) for scored in result.prompt_logprobs[1])
