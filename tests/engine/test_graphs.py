"""Recorded decode steps, with a recording that only calls again what it was made of."""

# ruff: noqa: E402 - what needs torch is imported after importorskip
from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch")

import attrs
from tests.engine.test_varlen import BLOCKS, LENGTHS, NEW, Kernel, chunked, generate
from tests.engine.tiny_models import BLOCK, Request, build, drive, greedy, prompt

from triolet.core import SamplingParams
from triolet.engine import graphs, varlen
from triolet.engine.blocks import BlockPool
from triolet.engine.graphs import DecodeGraphs, Recording
from triolet.engine.kv import KvPool, KvShape
from triolet.engine.plan import BlockCopy, Chunk, StepPlan
from triolet.engine.runner import build_runner

pytestmark = pytest.mark.torch

PAGES = 16


@attrs.define(eq=False)
class Recorder:
    """A capture that only calls again, and counts."""

    recorded: int = 0
    played: int = 0

    def __call__(self, compute):
        self.recorded += 1
        result = compute()

        def play():
            self.played += 1
            result.copy_(compute())

        return result, play


@pytest.fixture(params=["gathered", "kernel"])
def way(request, monkeypatch):
    if request.param == "kernel":
        monkeypatch.setattr(varlen, "find_kernel", lambda: kernel)
        for module in (varlen, graphs):
            monkeypatch.setattr(module, "why_gathered", lambda _pool: None)
    kernel = Kernel()
    return request.param


def runner_of(family, recorder, *, rows=64, blocks=BLOCKS, **options):
    return build_runner(
        build(family),
        num_blocks=blocks,
        block_size=BLOCK,
        max_num_seqs=rows,
        capture=recorder and (lambda: recorder),
        max_model_len=PAGES * BLOCK,
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "softcap", "sinks"])
def test_greedy_output_is_that_of_transformers(family, way):
    """Sequences come and go, so that rows and widths change; prompts in chunks between."""
    recorder = Recorder()
    runner = runner_of(family, recorder)
    reference = build(family)

    outputs = drive(runner, chunked(), num_blocks=BLOCKS)

    assert outputs == [generate(reference, prompt(n)) for n in LENGTHS]
    assert recorder.played > NEW


@pytest.mark.slow
def test_warming_up_records_every_number_of_rows_and_then_nothing_is(way):
    recorder = Recorder()
    runner = runner_of("llama", recorder, rows=6)

    runner.warm_up()

    # 1, 2, 4, 6; where pages are gathered, each for one page so far.
    assert recorder.recorded == 4
    drive(runner, chunked(), num_blocks=BLOCKS)
    assert (recorder.recorded == 4) == (way == "kernel")


@pytest.mark.slow
def test_a_model_that_the_kernel_cannot_do_gets_tables_no_wider_than_needed(way):
    recorder = Recorder()
    runner = runner_of("softcap", recorder, rows=1)

    drive(runner, [Request("a", prompt(5), greedy(8))], num_blocks=BLOCKS)

    # Twelve positions are three pages, and so in a table of four.
    assert max(width for _, width in runner._graphs._recordings) == 4


def chunk_of(start, blocks, token=5, *, row=0, **options):
    return Chunk("a", row, (token,), start, blocks, True, greedy(1), 0, **options)  # noqa: FBT003 - samples


def pool_of(blocks=9):
    return KvPool(
        KvShape(num_layers=1, kv_heads=1, head_dim=8),
        num_blocks=blocks,
        block_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        spare=1,
    )


def columns(recording):
    rows, width = recording.rows, recording.width
    *parts, tables = recording.numbers.split([rows] * 4 + [rows * width])
    return [part.tolist() for part in parts], tables.view(rows, width).tolist()


def test_a_step_is_laid_out_with_padding_in_the_dummy_page():
    recording = Recording(4, 3, pool_of())

    recording.load([chunk_of(6, (5, 1)), chunk_of(0, (2,), token=7)])

    (ids, positions, slots, lengths), tables = columns(recording)
    assert ids == [5, 7, 0, 0]
    assert positions == [6, 0, 0, 0]
    assert slots == [1 * 4 + 2, 2 * 4, 9 * 4, 9 * 4]
    assert lengths == [7, 1, 1, 1]
    # Behind a row's pages there are its own again: nobody else's are read, masked or not.
    assert tables == [[5, 1, 1], [2, 2, 2], [9, 9, 9], [9, 9, 9]]


def test_rows_that_a_step_leaves_are_padding_again():
    recording = Recording(4, 3, pool_of())
    recording.load([chunk_of(11, (5, 1, 3)), chunk_of(6, (2, 4)), chunk_of(3, (6,))])

    recording.load([chunk_of(3, (7,))])

    fresh = Recording(4, 3, pool_of())
    fresh.load([chunk_of(3, (7,))])
    assert columns(recording) == columns(fresh)


def test_a_table_follows_its_sequence_when_it_grows_and_when_another_takes_the_row():
    recording = Recording(1, 3, pool_of())

    def table(*steps):
        for start, blocks in steps:
            recording.load([chunk_of(start, blocks)])
        return columns(recording)[1][0]

    assert table((3, (5,)), (4, (5, 1))) == [5, 1, 1]
    assert table((8, (5, 1, 6)), (4, (8, 2))) == [8, 2, 2]


@pytest.mark.slow
def test_the_padding_writes_to_no_page_that_is_handed_out(way):
    runner = runner_of("llama", Recorder(), rows=8, blocks=12)
    pool = runner._pool
    for pages in (*pool.key_pages, *pool.value_pages):
        pages.fill_(7.0)

    # Three rows are played as four.
    chunks = [chunk_of(5, (2, 6), row=0), chunk_of(6, (3, 1), row=1), chunk_of(2, (5,), row=2)]
    runner.run(StepPlan(chunks=tuple(chunks)))

    written = {6: {1}, 1: {2}, 5: {2}}
    for pages in (*pool.key_pages, *pool.value_pages):
        for page in range(12):
            changed = {i for i in range(BLOCK) if bool((pages[page, i] != 7.0).any())}
            assert changed == written.get(page, set())
        assert bool((pages[12] != 7.0).any())


def test_the_dummy_page_is_never_handed_out():
    pool = pool_of(blocks=9)
    blocks = BlockPool(total_blocks=pool.num_blocks, block_size=4)

    handed_out = blocks.allocate(9)

    assert pool.dummy_page not in handed_out
    assert len(pool.key_pages[0]) == pool.dummy_page + 1


@pytest.mark.slow
def test_numbers_of_the_padding_reach_no_row(way):
    """A model with NaN for the padding's id: its row is lost, the others are as alone."""
    model = build("llama")
    sound = build_runner(model, num_blocks=BLOCKS, block_size=BLOCK, max_num_seqs=8)
    wanted = drive(sound, chunked(), num_blocks=BLOCKS)
    runner = runner_of("llama", Recorder(), rows=8)
    with torch.no_grad():
        runner._model.model.embed_tokens.weight[0] = torch.nan

    assert drive(runner, chunked(), num_blocks=BLOCKS) == wanted


@pytest.mark.slow
def test_a_page_that_a_step_opens_is_cleared_first(way):
    """What its last owner left there may be NaN, which no mask undoes."""
    runner = runner_of("llama", Recorder(), rows=1)
    [alone] = drive(runner, [Request("a", prompt(5), greedy(NEW))], num_blocks=BLOCKS)
    for pages in (*runner._pool.key_pages, *runner._pool.value_pages):
        pages.fill_(torch.nan)

    [again] = drive(runner, [Request("b", prompt(5), greedy(NEW))], num_blocks=BLOCKS)

    assert again == alone


@pytest.mark.slow
def test_pages_are_copied_before_a_step_is_played(way):
    """All of a prompt but its last token was found: its first step is one that only decodes."""
    recorder = Recorder()
    recorded, plain = runner_of("llama", recorder, rows=2), runner_of("llama", None, rows=2)
    ids = prompt(7)
    first = attrs.evolve(chunk_of(0, (5, 2)), token_ids=ids)
    copied = StepPlan((chunk_of(6, (5, 3), ids[6]),), copies=(BlockCopy(2, 3, 2),))
    expected = plain.run(StepPlan(chunks=(first,))).samples
    for pages in (*recorded._pool.key_pages, *recorded._pool.value_pages):
        pages[3] = torch.nan

    recorded.run(StepPlan(chunks=(first,)))
    samples = recorded.run(copied).samples

    assert recorder.played == 1
    assert samples == expected


@pytest.mark.slow
def test_only_steps_of_single_sampled_tokens_are_played(way):
    recorder = Recorder()
    runner = runner_of("llama", recorder, rows=2)
    decode = chunk_of(5, (2, 6))
    scored = attrs.evolve(
        decode,
        scores_prompt=True,
        sampling=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1),
        prompt_ids=(1,) * 9,
    )
    for others in ([attrs.evolve(decode, samples=False)], [attrs.evolve(decode, token_ids=(5, 6))]):
        runner.run(StepPlan(chunks=tuple(others)))
    runner.run(StepPlan(chunks=(scored,)))
    assert recorder.played == 0

    runner.run(StepPlan(chunks=(decode,)))
    assert recorder.played == 1


@pytest.mark.slow
def test_a_pool_that_is_built_anew_has_recordings_of_its_own(way):
    recorder = Recorder()
    runner = runner_of("llama", recorder, rows=1)
    request = [Request("a", prompt(5), greedy(NEW))]
    [wanted] = drive(runner, request, num_blocks=BLOCKS)
    before = recorder.recorded

    runner.reset()

    [again] = drive(runner, [Request("a", prompt(5), greedy(NEW))], num_blocks=BLOCKS)
    assert again == wanted
    assert recorder.recorded > before


@pytest.mark.slow
def test_a_model_that_cannot_be_recorded_is_served_all_the_same(way, caplog):
    def refuse(compute):
        compute()
        raise RuntimeError("operation not permitted when stream is capturing")

    runner = runner_of("llama", refuse)
    with caplog.at_level(logging.WARNING):
        runner.warm_up()
        outputs = drive(runner, chunked(), num_blocks=BLOCKS)

    assert outputs == [generate(build("llama"), prompt(n)) for n in LENGTHS]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_sizes_are_powers_of_two_up_to_the_largest():
    assert [graphs._size_of(n, 12) for n in (1, 2, 3, 5, 8, 9, 12)] == [1, 2, 4, 8, 8, 12, 12]


def test_more_rows_than_the_batch_has_and_scored_prompts_are_not_played():
    decode = DecodeGraphs(
        lambda *_: pytest.fail("computed"), pool_of(), capture=Recorder(), max_rows=1, max_pages=2
    )

    assert decode.run([chunk_of(3, (1,)), chunk_of(2, (2,))]) is None
    assert decode.run([chunk_of(3, (1,), scores_prompt=True)]) is None
