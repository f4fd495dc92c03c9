from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from triolet.core import EngineRequest, FinishReason, RequestId, SamplingParams
from triolet.engine.blocks import BlockPool
from triolet.engine.scheduler import Scheduler
from triolet.errors import ConfigError, ContextLengthError, EngineError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.engine.plan import StepPlan

EOS = 0
VOCAB = 13


def next_token(content: Sequence[int], seed: int, output_index: int) -> int:
    """A model: depends on every id before, the seed and the index, and on nothing else."""
    return zlib.crc32(repr((tuple(content), seed, output_index)).encode()) % VOCAB


def solo(request: EngineRequest, max_model_len: int) -> tuple[list[int], FinishReason, int | None]:
    """What the request gives alone: contract section 3, written down a second time."""
    sampling, content = request.sampling, list(request.prompt_ids)
    for index in range(sampling.max_tokens):
        token = next_token(content, sampling.seed, index)
        content.append(token)
        outputs = content[len(request.prompt_ids) :]
        if token == EOS and not sampling.ignore_eos:
            return outputs, FinishReason.STOP, None
        if token in sampling.stop_token_ids:
            return outputs, FinishReason.STOP, token
        if len(content) == max_model_len:
            break
    return outputs, FinishReason.LENGTH, None


class PagedModel:
    """Keeps ids in blocks as a runner keeps keys and values, and reads them back from there."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[tuple[int, int], int] = {}

    def run(self, plan: StepPlan) -> list[int]:
        sampled = []
        for chunk in plan.chunks:
            for position, token in enumerate(chunk.token_ids, chunk.start):
                self.slots[self.slot(chunk.blocks, position)] = token
            stop = chunk.start + len(chunk.token_ids)
            assert len(chunk.blocks) == -(-stop // self.block_size)
            if chunk.samples:
                content = [self.slots[self.slot(chunk.blocks, p)] for p in range(stop)]
                sampled.append(next_token(content, chunk.sampling.seed, chunk.output_index))
        return sampled

    def slot(self, blocks: tuple[int, ...], position: int) -> tuple[int, int]:
        return blocks[position // self.block_size], position % self.block_size

    def reset(self) -> None:
        self.slots.clear()


def request(name="a", prompt=(1, 2, 3), **sampling) -> EngineRequest:
    sampling.setdefault("max_tokens", 4)
    sampling.setdefault("ignore_eos", True)
    return EngineRequest(RequestId(name), tuple(prompt), SamplingParams(**sampling))


def scheduler(blocks=8, block_size=2, rows=2, budget=8, max_model_len=16) -> Scheduler:
    return Scheduler(BlockPool(blocks, block_size), rows, budget, max_model_len, frozenset({EOS}))


def step(sched: Scheduler, token: int = 5):
    """Run one step in which every chunk that samples gives ``token``."""
    plan = sched.plan()
    outputs = sched.apply(plan, [token] * plan.samples)
    sched.check()
    return plan, outputs


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(c.request_id, c.start, len(c.token_ids), c.samples) for c in plan.chunks]


# Construction and what comes in


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ({"blocks": 7}, "needs 8"),
        ({"rows": 0}, "max_num_seqs"),
        ({"rows": 9}, "max_num_batched_tokens"),
        ({"max_model_len": 1}, "max_model_len"),
    ],
)
def test_numbers_that_could_starve_a_request_are_refused(numbers, match):
    with pytest.raises(ConfigError, match=match):
        scheduler(**numbers)


def test_a_request_that_can_never_run_is_refused_and_not_held():
    sched = scheduler()
    with pytest.raises(InvalidRequestError):
        sched.add(request(prompt=()))
    with pytest.raises(ContextLengthError):
        sched.add(request(prompt=range(16)))
    assert not sched.has_work
    sched.add(request(prompt=range(15)))
    with pytest.raises(EngineError, match="twice"):
        sched.add(request())


def test_nothing_to_do_gives_no_plan():
    assert scheduler().plan() is None


# Steps


def test_decodes_come_before_prefill_chunks_under_one_budget():
    sched = scheduler(budget=4, blocks=16)
    sched.add(request("a", [1, 2]))
    step(sched)
    sched.add(request("b", range(1, 8)))
    assert shape(step(sched)[0]) == [("a", 2, 1, True), ("b", 0, 3, False)]
    assert shape(step(sched)[0]) == [("a", 3, 1, True), ("b", 3, 3, False)]
    plan, outputs = step(sched)
    assert shape(plan) == [("a", 4, 1, True), ("b", 6, 1, True)]
    assert [o.request_id for o in outputs] == ["a", "b"]


def test_admissions_share_one_budget():
    sched = scheduler(budget=4)
    sched.add(request("a", [1, 2, 3]))
    sched.add(request("b", [1, 2, 3]))
    assert shape(step(sched)[0]) == [("a", 0, 3, True), ("b", 0, 1, False)]


def test_a_head_that_does_not_fit_is_not_overtaken():
    sched = scheduler(rows=3, budget=16)
    sched.add(request("a", range(1, 9)))
    step(sched)
    sched.add(request("big", range(1, 14)))
    sched.add(request("small", [1]))
    assert [c.request_id for c in step(sched)[0].chunks] == ["a"]


@pytest.mark.parametrize(("prompt", "names"), [(4, ["a", "b"]), (6, ["a"])])
def test_an_admission_leaves_a_block_for_each_running_sequence(prompt, names):
    sched = scheduler(budget=16)
    sched.add(request("a", range(1, 9)))
    step(sched)
    sched.add(request("b", range(prompt)))  # a has taken its fifth of 8 blocks by then
    assert [c.request_id for c in step(sched)[0].chunks] == names


def test_first_scheduled_names_each_request_once():
    sched = scheduler(budget=2)
    sched.add(request("a", [1, 2, 3]))
    assert step(sched)[0].first_scheduled == ("a",)
    assert step(sched)[0].first_scheduled == ()
    sched.fail(sched.plan())
    sched.add(request("b", [1]))
    sched.pause(RequestId("b"))
    sched.add(request("c", [1]))
    assert step(sched)[0].first_scheduled == ("c",)


def test_the_youngest_is_preempted_and_goes_back_to_the_front():
    sched = scheduler(blocks=8, rows=3, budget=16)
    sched.add(request("a", [1, 2, 3], max_tokens=13))
    sched.add(request("b", [1, 2, 3], max_tokens=13))
    plan, _ = step(sched)
    assert [c.request_id for c in plan.chunks] == ["a", "b"]
    sched.add(request("c", range(1, 9)))
    while sched.statistics().preemptions == 0:
        assert "c" not in [c.request_id for c in step(sched)[0].chunks]
    assert list(sched._waiting) == ["b", "c"]
    while "b" not in [c.request_id for c in plan.chunks[:1]]:
        plan, _ = step(sched)
    again = plan.chunks[0]
    assert again.start == 0
    assert again.token_ids[:4] == (1, 2, 3, 5)
    assert again.output_index == len(again.token_ids) - 3
    assert plan.first_scheduled == ()


def test_a_paused_sequence_is_preempted_before_a_younger_one():
    sched = scheduler(blocks=8, rows=3, budget=16)
    for name in "abc":
        sched.add(request(name, [1, 2], max_tokens=14))
    step(sched)
    step(sched)
    sched.pause(RequestId("a"))
    while sched.statistics().preemptions == 0:
        step(sched)
    assert list(sched._parked) == ["a"]
    sched.resume(RequestId("a"))
    assert next(iter(sched._waiting)) == "a"


def test_the_youngest_without_a_block_waits_with_what_it_has():
    sched = scheduler(budget=16)
    sched.add(request("a", range(7), max_tokens=9))
    step(sched)
    sched.add(request("b", range(5), max_tokens=9))
    while len(step(sched)[0].chunks) == 2:
        held = sched._sequences[RequestId("b")].blocks
    assert sched._sequences[RequestId("b")].blocks == held
    assert sched.statistics().used_blocks == 8
    assert sched.statistics().preemptions == 0
    step(sched)
    assert sched.statistics().preemptions == 1


# Pause


def test_a_paused_sequence_is_not_planned_and_keeps_its_kv():
    sched = scheduler()
    sched.add(request("a", max_tokens=9))
    step(sched)
    assert sched.pause(RequestId("a"))
    assert not sched.pause(RequestId("a"))
    assert not sched.has_work
    assert sched.plan() is None
    assert sched.statistics().used_blocks > 0
    assert sched.resume(RequestId("a"))
    assert not sched.resume(RequestId("a"))
    assert shape(step(sched)[0]) == [("a", 3, 1, True)]


def test_paused_sequences_give_rows_and_blocks_to_whoever_waits():
    sched = scheduler(rows=2)
    for name in "ab":
        sched.add(request(name, [1, 2, 3]))
    step(sched)
    for name in "ab":
        sched.pause(RequestId(name))
    sched.add(request("c"))
    assert [c.request_id for c in step(sched)[0].chunks] == ["c"]
    assert list(sched._parked) == ["b"]
    assert list(sched._running) == ["a", "c"]


def test_an_admission_that_fits_not_even_so_takes_nothing_from_paused_ones():
    sched = scheduler(rows=3, budget=16)
    sched.add(request("a", range(1, 5), max_tokens=9))
    sched.add(request("b", range(1, 3), max_tokens=9))
    step(sched)
    sched.pause(RequestId("b"))
    sched.add(request("c", range(1, 14)))
    step(sched)
    assert sched.statistics().preemptions == 0


def test_a_token_sampled_while_its_request_is_paused_is_kept():
    sched = scheduler()
    sched.add(request("a"))
    plan = sched.plan()
    sched.pause(RequestId("a"))
    assert [o.token_ids for o in sched.apply(plan, [7])] == [(7,)]


def test_a_request_paused_in_the_queue_lets_others_pass():
    sched = scheduler(rows=1)
    sched.add(request("a"))
    sched.add(request("b"))
    sched.pause(RequestId("a"))
    assert [c.request_id for c in step(sched)[0].chunks] == ["b"]


# Abort


def test_an_abort_in_the_queue_frees_at_once_and_a_second_is_late():
    sched = scheduler()
    sched.add(request("a"))
    assert sched.abort(RequestId("a"))
    assert not sched.has_work
    assert not sched.abort(RequestId("a"))
    assert not sched.abort(RequestId("never"))
    assert not sched.pause(RequestId("a"))
    assert not sched.resume(RequestId("a"))
    assert sched.statistics().late_aborts == 2


def test_an_abort_between_steps_frees_at_once():
    sched = scheduler()
    sched.add(request("a"))
    step(sched)
    assert sched.abort(RequestId("a"))
    assert sched.statistics().used_blocks == sched.statistics().used_rows == 0


def test_an_abort_under_a_running_step_frees_in_apply_and_drops_the_token():
    sched = scheduler()
    sched.add(request("a"))
    sched.add(request("b"))
    plan = sched.plan()
    assert sched.abort(RequestId("a"))
    assert not sched.abort(RequestId("a"))
    assert all(map(sched.pool.held, plan.chunks[0].blocks))
    outputs = sched.apply(plan, [5, 6])
    assert [(o.request_id, o.token_ids) for o in outputs] == [("b", (6,))]
    assert sched.statistics().used_rows == 1
    sched.check()


def test_an_id_can_be_used_again_after_its_request_has_ended():
    sched = scheduler()
    sched.add(request("a"))
    sched.abort(RequestId("a"))
    sched.add(request("a"))
    assert sched.plan().first_scheduled == ("a",)


# Ends


@pytest.mark.parametrize(
    ("sampling", "token", "finish", "stop_token_id"),
    [
        ({"ignore_eos": False}, EOS, FinishReason.STOP, None),
        ({"ignore_eos": False, "stop_token_ids": frozenset({EOS})}, EOS, FinishReason.STOP, None),
        ({"stop_token_ids": frozenset({EOS})}, EOS, FinishReason.STOP, EOS),
        ({"stop_token_ids": frozenset({7}), "max_tokens": 1}, 7, FinishReason.STOP, 7),
        ({"max_tokens": 1}, 7, FinishReason.LENGTH, None),
        ({"max_tokens": 99, "prompt": range(15)}, 7, FinishReason.LENGTH, None),
        ({}, EOS, None, None),
    ],
    ids=["eos", "eos first", "eos as stop id", "stop id", "max_tokens", "model length", "goes on"],
)
def test_what_ends_a_sequence_in_the_order_of_the_contract(sampling, token, finish, stop_token_id):
    sched = scheduler(budget=16)
    sched.add(request("a", **{"prompt": (1, 2, 3), **sampling}))
    _, [output] = step(sched, token)
    assert output.token_ids == (token,)
    assert (output.finish, output.stop_token_id) == (finish, stop_token_id)
    assert (sched.statistics().used_rows == 0) == (finish is not None)


# Failure, misuse, statistics


def test_a_failed_step_drops_its_requests_and_recomputes_the_others_by_age():
    sched = scheduler(blocks=16, rows=5, budget=10)
    for name in "abcde":
        sched.add(request(name, [1, 2], max_tokens=9))
    step(sched)
    for name in "bcd":
        sched.pause(RequestId(name))
    plan = sched.plan()
    sched.resume(RequestId("d"))
    sched.resume(RequestId("c"))
    sched.abort(RequestId("e"))
    assert sched.fail(plan) == ["a"]
    sched.check()
    assert sched.statistics().used_blocks == sched.statistics().used_rows == 0
    assert (list(sched._waiting), list(sched._parked)) == (["c", "d"], ["b"])
    assert shape(step(sched)[0]) == [("c", 0, 3, True), ("d", 0, 3, True)]


def test_a_result_that_does_not_belong_changes_nothing():
    sched = scheduler()
    sched.add(request("a"))
    plan = sched.plan()
    with pytest.raises(EngineError, match="under way"):
        sched.plan()
    for sampled in [], [1, 2]:
        with pytest.raises(EngineError, match="samples 1"):
            sched.apply(plan, sampled)
    sched.apply(plan, [1])
    with pytest.raises(EngineError, match="not under way"):
        sched.apply(plan, [1])
    with pytest.raises(EngineError, match="not under way"):
        sched.fail(plan)


def test_statistics_count_each_request_in_one_place_and_recomputed_tokens_once():
    sched = scheduler(rows=2, blocks=8)
    for name in "abcd":
        sched.add(request(name, [1, 2, 3]))
    step(sched)
    sched.pause(RequestId("a"))
    sched.pause(RequestId("d"))
    stats = sched.statistics()
    assert (stats.waiting, stats.running, stats.paused) == (1, 1, 2)
    assert (stats.used_rows, stats.total_rows, stats.total_blocks) == (2, 2, 8)
    sched.fail(sched.plan())  # b and c, who had a's row
    sched.resume(RequestId("a"))
    step(sched)
    stats = sched.statistics()
    assert (stats.steps, stats.prompt_tokens, stats.output_tokens) == (3, 9, 3)


def test_the_check_raises_when_a_block_is_lost():
    sched = scheduler()
    sched.pool.allocate(1)
    with pytest.raises(EngineError, match="held by nobody"):
        sched.check()


# Any interleaving


class AnyInterleaving(RuleBasedStateMachine):
    """Requests come, go, pause and fail in any order; each gives what it gives alone."""

    @initialize(
        spare=st.integers(0, 3),
        block_size=st.integers(1, 3),
        rows=st.integers(1, 4),
        over=st.integers(0, 6),
        max_model_len=st.integers(4, 12),
    )
    def start(self, spare, block_size, rows, over, max_model_len):
        pool = BlockPool(-(-max_model_len // block_size) + spare, block_size)
        self.sched = Scheduler(pool, rows, rows + over, max_model_len, frozenset({EOS}))
        self.model = PagedModel(block_size)
        self.plan: StepPlan | None = None
        self.requests: dict[RequestId, EngineRequest] = {}
        self.produced: dict[RequestId, list[int]] = {}
        self.held: set[RequestId] = set()
        self.paused: set[RequestId] = set()
        self.scheduled: set[RequestId] = set()

    def doomed(self) -> set[RequestId]:
        """Aborted under the step that is under way."""
        return {c.request_id for c in self.plan.chunks} - self.held if self.plan else set()

    def pick(self, which: int) -> RequestId:
        """Mostly a request still held, at times one long gone or never seen."""
        planned = [chunk.request_id for chunk in self.plan.chunks] if self.plan else []
        names = [*3 * planned, *sorted(self.held), *self.requests, RequestId("never")]
        return names[which % len(names)]

    @rule(
        prompts=st.lists(st.integers(1, 11), min_size=1, max_size=4),
        max_tokens=st.sampled_from([12, 8, 4, 1]),  # long first: short lives meet nobody
        ignore_eos=st.booleans(),
        stops=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
    )
    def add(self, prompts, max_tokens, ignore_eos, stops):
        for prompt in prompts:
            self.add_one(prompt, max_tokens, ignore_eos, stops)

    def add_one(self, prompt, max_tokens, ignore_eos, stops):
        number = len(self.requests)
        req = EngineRequest(
            RequestId(f"r{number:03}"),
            tuple((number + i) % VOCAB for i in range(min(prompt, self.sched.max_model_len - 1))),
            SamplingParams(max_tokens, seed=number, ignore_eos=ignore_eos, stop_token_ids=stops),
        )
        self.sched.add(req)
        self.requests[req.id] = req
        self.produced[req.id] = []
        self.held.add(req.id)

    @rule(which=st.integers(0, 99))
    def abort(self, which):
        name = self.pick(which)
        assert self.sched.abort(name) == (name in self.held)
        self.held.discard(name)
        self.paused.discard(name)

    @rule(which=st.integers(0, 99))
    def pause(self, which):
        name = self.pick(which)
        assert self.sched.pause(name) == (name in self.held - self.paused)
        self.paused |= {name} & self.held

    @rule(which=st.integers(0, 99))
    def resume(self, which):
        name = self.pick(which)
        assert self.sched.resume(name) == (name in self.paused)
        self.paused.discard(name)

    @precondition(lambda self: self.plan is None and self.held)
    @rule()
    def begin(self):
        has_work = self.sched.has_work
        running = [s for s in self.sched._running.values() if not s.paused]
        oldest = min(running, key=lambda s: s.arrival).id if running else None
        self.plan = self.sched.plan()
        assert (self.plan is not None) == has_work == bool(self.held - self.paused)
        if self.plan is None:
            return
        ids = [chunk.request_id for chunk in self.plan.chunks]
        assert oldest is None or oldest in ids, "the oldest is in every plan"
        assert len(set(ids)) == len(ids)
        assert set(ids) <= self.held - self.paused
        assert len({chunk.row for chunk in self.plan.chunks}) == len(ids)
        spent = sum(len(chunk.token_ids) for chunk in self.plan.chunks)
        assert len(ids) <= spent <= self.sched.max_num_batched_tokens
        assert len(self.sched._running) <= self.sched.max_num_seqs
        assert set(self.plan.first_scheduled) == set(ids) - self.scheduled
        self.scheduled |= set(ids)

    @precondition(lambda self: self.plan is not None)
    @rule()
    def finish(self):
        plan, self.plan = self.plan, None
        sampled = self.model.run(plan)
        told = [c.request_id for c in plan.chunks if c.samples and c.request_id in self.held]
        outputs = self.sched.apply(plan, sampled)
        assert [output.request_id for output in outputs] == told
        for output in outputs:
            produced = self.produced[output.request_id]
            produced += output.token_ids
            tokens, reason, stop = solo(self.requests[output.request_id], self.sched.max_model_len)
            assert produced == tokens[: len(produced)]
            ended = len(produced) == len(tokens)
            assert (output.finish, output.stop_token_id) == (
                (reason, stop) if ended else (None, None)
            )
            if ended:
                self.held.discard(output.request_id)
                self.paused.discard(output.request_id)

    @precondition(lambda self: self.held)
    @rule(times=st.integers(1, 4))
    def steps(self, times):
        for _ in range(times):
            if self.plan is None:
                self.begin()
            if self.plan is not None:
                self.finish()
            self.books_balance()

    def fail(self):
        plan, self.plan = self.plan, None
        ids = [chunk.request_id for chunk in plan.chunks if chunk.request_id in self.held]
        assert self.sched.fail(plan) == ids
        assert not self.sched._running, "no KV outlives a failed step"
        self.model.reset()
        self.held -= set(ids)
        self.paused -= set(ids)

    @precondition(lambda self: self.held)
    @rule(
        acts=st.lists(st.tuples(st.sampled_from(["abort", "pause", "resume"]), st.integers(0, 99))),
        fails=st.sampled_from([False, False, False, True]),
    )
    def meddle_with_a_step(self, acts, fails):
        if self.plan is None:
            self.begin()
        for act, which in acts:
            getattr(self, act)(which)
            self.books_balance()
        if self.plan is not None:
            self.fail() if fails else self.finish()

    @invariant()
    def books_balance(self):
        if not hasattr(self, "sched"):
            return
        self.sched.check()
        stats = self.sched.statistics()
        assert set(self.sched._sequences) == self.held | self.doomed()
        assert stats.paused >= len(self.paused)
        assert stats.waiting + stats.running + stats.paused == len(self.sched._sequences)
        for chunk in self.plan.chunks if self.plan else ():
            assert all(map(self.sched.pool.held, chunk.blocks)), "a running step writes there"

    def teardown(self):
        if not hasattr(self, "sched"):
            return
        for name in sorted(self.paused):
            self.sched.resume(name)
        self.paused.clear()
        # Each step gets the oldest on by a token at least; twice, as an older one may come back.
        for _ in range(2 * (1 + len(self.held)) * self.sched.max_model_len):
            if not self.held:
                break
            self.steps(1)
        if self.plan is not None:
            self.finish()
        assert not self.held, "starved"
        stats = self.sched.statistics()
        assert (stats.used_blocks, stats.used_rows) == (0, 0)
        assert not self.sched._sequences


AnyInterleaving.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    # A scheduler that livelocks would take minutes to shrink.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
test_every_request_gives_what_it_gives_alone = pytest.mark.slow(AnyInterleaving.TestCase)
