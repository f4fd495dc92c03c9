# ruff: noqa: E402 - what needs torch is imported after importorskip
"""Tiny models say the same with computed prefixes as without."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import attrs
from tests.engine.test_runner import chunk_of
from tests.engine.tiny_models import FAMILIES, Request, build, drive, greedy, prompt

from triolet.core import EngineRequest, RequestId, SamplingParams
from triolet.engine import kv
from triolet.engine.blocks import BlockPool
from triolet.engine.kv import KvPool, KvShape
from triolet.engine.loop import Engine
from triolet.engine.plan import BlockCopy, StepPlan
from triolet.engine.prefix import PrefixIndex
from triolet.engine.runner import build_runner
from triolet.engine.scheduler import Scheduler

# What they cover others do too, and being measured takes them twice the time.
pytestmark = [pytest.mark.torch, pytest.mark.no_cover]

NEW = 12
SIZE = 4
BLOCKS = 400
SHARED = prompt(37)
#: Ends in the middle of a block, at its border, one after it; and one prompt twice.
PROMPTS = (
    SHARED,
    SHARED[:30] + prompt(9, 1),
    SHARED[:32] + prompt(2, 2),
    SHARED[:33] + prompt(5, 3),
    SHARED,
    SHARED[:36],
    prompt(11, 4),
    SHARED[:3] + prompt(3, 5),
)
#: In none of these, nor in what the tiny llama makes of them.
POISON = 2


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def subjects():
    """By family: a runner, and what it says to each prompt alone with nothing to reuse."""
    built = {}

    def get(family):
        if family not in built:
            runner = build_runner(
                build(family), num_blocks=BLOCKS, block_size=SIZE, max_num_seqs=32
            )
            said = {}
            for ids in dict.fromkeys(PROMPTS):
                [said[ids]] = drive(runner, [Request("a", ids, greedy(NEW))], num_blocks=BLOCKS)
            built[family] = runner, said
        return built[family]

    return get


@attrs.define(eq=False)
class Serving:
    """An engine, what it has said and to whom."""

    runner: object
    blocks: int = BLOCKS
    budget: int = 64
    rows: int = 16
    cached: dict[str, int] = attrs.field(factory=dict)
    said: dict[tuple[str, int], list[int]] = attrs.field(factory=dict)
    failed: list[str] = attrs.field(factory=list)

    scheduler: Scheduler = attrs.field(init=False)
    engine: Engine = attrs.field(init=False)

    def __attrs_post_init__(self):
        pool = BlockPool(self.blocks, SIZE, index=PrefixIndex(SIZE, 1))
        self.scheduler = Scheduler(pool, self.rows, self.budget, 72, frozenset())
        self.engine = Engine(self.scheduler, self.runner)

    @property
    def known(self):
        return self.engine.statistics().cached_blocks

    def add(self, name, ids, sampling=None, n=1):
        self.engine.add(EngineRequest(RequestId(name), ids, sampling or greedy(NEW), n))
        self.said |= {(name, choice): [] for choice in range(n)}

    def step(self):
        result = self.engine.step()
        if result is None:  # all are paused
            return
        self.failed += [failure.request_id for failure in result.failures]
        for output in result.outputs:
            self.said[output.request_id, output.choice] += output.token_ids
            if output.cached_tokens:
                self.cached[output.request_id] = output.cached_tokens
        self.scheduler.check()

    def run(self):
        while self.engine.has_work:
            self.step()
        assert self.engine.statistics().used_blocks == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_one_after_the_other_they_say_what_they_say_alone(subjects, family):
    runner, said = subjects(family)
    serving = Serving(runner)
    for number, ids in enumerate(PROMPTS):
        serving.add(f"{number}", ids)
        serving.run()
        assert serving.said[f"{number}", 0] == said[ids]
    assert serving.cached == {"1": 30, "2": 32, "3": 33, "4": 36, "5": 35, "7": 3}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("blocks", "budget"), [(BLOCKS, 16), (22, 17), (22, 64)])
def test_in_chunks_among_others_and_preempted_they_say_what_they_say_alone(
    subjects, family, blocks, budget
):
    runner, said = subjects(family)
    serving = Serving(runner, blocks=blocks, budget=budget)
    for turn in range(3):
        for number, ids in enumerate(PROMPTS):
            serving.add(f"{turn} {number}", ids)
            serving.step()
            if number % 3 == turn:
                serving.engine.pause(RequestId(f"{turn} {number}"))
                serving.step()
        for number in range(len(PROMPTS)):
            serving.engine.resume(RequestId(f"{turn} {number}"))
    serving.run()
    assert serving.said == {
        (f"{turn} {number}", 0): said[ids]
        for turn in range(3)
        for number, ids in enumerate(PROMPTS)
    }
    assert (serving.engine.statistics().preemptions > 0) == (blocks < BLOCKS)
    assert len(serving.cached) > 10


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_next_turn_of_a_chat_says_what_it_says_alone(subjects, family):
    runner, said = subjects(family)
    follow_up = SHARED + tuple(said[SHARED]) + prompt(4, 6)
    [expected] = drive(runner, [Request("a", follow_up, greedy(NEW))], num_blocks=BLOCKS)
    serving = Serving(runner)
    serving.add("first", SHARED)
    serving.run()
    serving.add("second", follow_up)
    serving.run()
    assert serving.said["second", 0] == expected
    assert serving.cached == {"second": 37 + NEW - 1}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_choices_and_seeds_say_what_they_say_alone(subjects, family):
    runner, _ = subjects(family)
    sampling = SamplingParams(max_tokens=NEW, temperature=0.9, seed=7)

    def ask(*warm):
        serving = Serving(runner)
        for ids in warm:
            serving.add("warm", ids)
            serving.run()
        serving.add("a", SHARED, sampling, n=3)
        serving.run()
        return {choice: serving.said["a", choice] for choice in range(3)}, serving.cached

    alone, _ = ask()
    found, cached = ask(PROMPTS[1])
    assert cached["a"] == 30
    assert found == alone
    assert len({tuple(said) for said in found.values()}) == 3


def test_a_copy_moves_the_beginning_of_a_page_in_all_layers_and_clears_the_rest():
    pool = KvPool(
        KvShape(3, 2, 4),
        num_blocks=6,
        block_size=SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for pages in (pool._keys, pool._values):
        pages.copy_(torch.arange(pages.numel()).view(pages.shape) + 1)
    before = [pool._keys.clone(), pool._values.clone()]

    # The last one writes to what the first one reads.
    pool.copy([BlockCopy(1, 4, 3), BlockCopy(2, 2, 1), BlockCopy(0, 1, 2)])

    for now, then in zip((pool._keys, pool._values), before, strict=True):
        for source, target, tokens in (1, 4, 3), (2, 2, 1), (0, 1, 2):
            assert (now[:, target, :tokens] == then[:, source, :tokens]).all()
            assert (now[:, target, tokens:] == 0).all()
        for untouched in 0, 3, 5:
            assert (now[:, untouched] == then[:, untouched]).all()


@pytest.mark.parametrize("at_once", [1, 2, 9])
def test_copies_in_parts_are_the_same(at_once, monkeypatch):
    shape = KvShape(3, 2, 4, 3)
    size = {"num_blocks": 9, "block_size": SIZE, "dtype": torch.float32}
    pools = [KvPool(shape, **size, device=torch.device("cpu"), spare=1) for _ in range(2)]
    for pool in pools:
        for pages in (pool._keys, pool._values):
            pages.copy_(torch.arange(pages.numel()).view(pages.shape) + 1)
    copies = [BlockCopy(1, 4, 3), BlockCopy(2, 3, 1), BlockCopy(0, 1, 2), BlockCopy(2, 5, 1)]
    pools[0].copy(copies)

    calls = []
    whole = KvPool._copy
    monkeypatch.setattr(kv, "COPIED_BYTES", at_once * 3 * SIZE * 2 * 4 * 4)
    monkeypatch.setattr(KvPool, "_copy", lambda *args: (calls.append(len(args[1])), whole(*args)))
    pools[1].copy(copies)

    assert calls == {1: [1, 1, 1, 1], 2: [2, 2], 9: [4]}[at_once]
    assert all(
        (one == other).all() for one, other in zip(pools[0].keys, pools[1].keys, strict=True)
    )
    assert (pools[0]._values == pools[1]._values).all()
    assert pools[0].dummy_page == 9


@pytest.fixture
def poisoned(subjects):
    """A runner whose model computes NaN wherever POISON is in the prompt."""
    _, said = subjects("llama")
    assert POISON not in {i for ids, said in said.items() for i in (*ids, *said)}
    model = build("llama")
    runner = build_runner(model, num_blocks=BLOCKS, block_size=SIZE, max_num_seqs=32)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    return runner


BAD = (*SHARED[:20], POISON, *prompt(20, 7))


def test_a_copy_brings_no_numbers_of_the_tokens_behind_it(subjects):
    """Whatever a page holds behind what is copied: it is not told apart from what is computed."""
    runner, _ = subjects("llama")
    serving = Serving(runner)
    serving.add("a", SHARED[:30])
    serving.run()
    [*_, page] = (p.block for p in serving.scheduler.pool.index.match("", SHARED[:30]))
    for pages in runner._pool._keys, runner._pool._values:
        pages[:, page, 2:] = torch.nan
    # Pages are read beyond a row's own end only beside a longer row.
    serving.add("longer", prompt(50, 9))
    serving.step()
    serving.add("b", (*SHARED[:26], *prompt(1, 8)))
    serving.run()
    assert serving.cached == {"b": 26}
    assert serving.failed == []
    assert len(serving.said["b", 0]) == NEW


def test_numbers_that_are_not_finite_spoil_no_prompt_that_begins_alike(subjects, poisoned):
    """In the chunk with the bad token those before it are bad too: SDPA multiplies 0 by NaN."""
    said = subjects("llama")[1]
    serving = Serving(poisoned, budget=16)
    serving.add("bad", BAD, n=2)
    serving.run()
    assert serving.failed == ["bad"]
    assert serving.known == 0
    serving.add("good", SHARED)
    serving.run()
    known = serving.known
    serving.add("worse", BAD)
    serving.run()
    assert serving.failed == ["bad", "worse"]
    assert serving.known == known
    serving.add("again", SHARED)
    serving.run()
    assert serving.cached == {"again": 36}
    assert serving.said["good", 0] == serving.said["again", 0] == said[SHARED]


def test_a_prompt_aborted_half_way_leaves_no_numbers_that_are_not_finite(subjects, poisoned):
    said = subjects("llama")[1]
    serving = Serving(poisoned, budget=18)
    # Its first chunk is sound; its second is not, and does not sample.
    serving.add("bad", BAD)
    serving.step()
    assert serving.known == 0
    assert len(serving.scheduler.pool.index) == 4
    serving.step()
    assert serving.failed == ["bad"]
    serving.add("good", SHARED)
    serving.run()
    assert serving.said["good", 0] == said[SHARED]


@pytest.mark.parametrize("chunks", [(1, 1), (5, 1), (5, 3)])
def test_the_runner_names_whose_prompt_is_not_finite_before_it_samples(poisoned, chunks):
    good, bad = chunks
    plan = StepPlan((
        chunk_of("good", token_ids=SHARED[:good], blocks=(0, 1), samples=False),
        chunk_of("bad", token_ids=(POISON, *SHARED)[:bad], blocks=(2, 3), samples=False, row=1),
    ))
    assert poisoned.run(plan).unsound_prompts == {"bad"}


@pytest.mark.parametrize("bad", [1, 3])
def test_so_it_does_beside_others_that_are_sampled_from(poisoned, bad):
    """The check looks at one run of slots: behind the rows that decode, whatever came first."""
    others = {
        name: chunk_of(name, token_ids=SHARED[:tokens], blocks=(2 * row, 2 * row + 1), row=row)
        for row, (name, tokens) in enumerate([("long", 5), ("short", 1)])
    }
    named = {"token_ids": (POISON, *SHARED)[:bad], "blocks": (6, 7), "samples": False, "row": 2}
    plan = StepPlan((chunk_of("bad", **named), *others.values()))
    result = poisoned.run(plan)
    assert result.unsound_prompts == {"bad"}
    assert min(sample.token_id for sample in result.samples) >= 0


def test_a_failed_step_forgets_what_the_pool_has_lost(subjects):
    runner, said = subjects("llama")
    serving = Serving(runner)
    serving.add("a", SHARED)
    serving.run()

    class Broken:
        reset = runner.reset

        def run(self, _):
            raise RuntimeError("a bad kernel")

    serving.engine._runner = Broken()
    serving.add("b", SHARED)
    serving.step()
    serving.engine._runner = runner
    serving.add("c", SHARED)
    serving.run()
    assert serving.failed == ["b"]
    assert "c" not in serving.cached
    assert serving.said["c", 0] == said[SHARED]
