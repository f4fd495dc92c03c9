"""What the scheduler makes of computed prefixes; the state machine is in test_scheduler."""

from __future__ import annotations

import attrs
import pytest
from tests.engine.test_scheduler import (
    PagedModel,
    names,
    planned,
    prompt_score,
    request,
    sampled,
    solo,
    step,
)

from triolet.core import RequestId
from triolet.engine.blocks import BlockPool
from triolet.engine.plan import BlockCopy, Sample, StepSamples
from triolet.engine.prefix import PrefixIndex
from triolet.engine.scheduler import Scheduler


def scheduler(blocks=16, block_size=2, rows=4, budget=16, max_model_len=16, least=1):
    pool = BlockPool(blocks, block_size, index=PrefixIndex(block_size, least))
    return Scheduler(pool, rows, budget, max_model_len, frozenset({0}))


def salted(salt, *args, **options):
    return attrs.evolve(request(*args, **options), cache_salt=salt)


def run(sched, *requests, token=5):
    """Add requests and run until nothing is left; all plans and all outputs."""
    for one in requests:
        sched.add(one)
    plans, outputs = [], []
    while sched.has_work:
        plan, said = step(sched, token)
        plans.append(plan)
        outputs += said
    return plans, outputs


def begins(plans):
    """Where the first chunk of each choice starts."""
    starts = {}
    for plan in plans:
        for name, start, _ in planned(plan):
            starts.setdefault(name, start)
    return starts


@pytest.mark.parametrize("block_size", [16, 256])
def test_800_tokens_of_822_are_reused_though_they_end_within_a_block(block_size):
    """Blocks as on a CPU, and as on a GPU."""
    blocks = 2048 // block_size
    sched = scheduler(blocks=blocks, block_size=block_size, budget=64, max_model_len=1024)
    shared = range(1, 801)
    for tail in (7, 9, 11):  # 807 and so on: not a whole number of blocks
        prompt = (*shared, *range(1000, 1000 + tail))
        run(sched, request(f"{tail}", (*prompt, *range(2000 + tail, 2022)), max_tokens=1))
        before = sched.statistics()
        plans, [output] = run(
            sched, request(f"again {tail}", (*prompt, *[3000 + tail] * 15), max_tokens=1)
        )
        assert begins(plans) == {f"again {tail}0": 800 + tail}
        assert output.cached_tokens == 800 + tail
        after = sched.statistics()
        assert after.prefix_hit_tokens - before.prefix_hit_tokens == 800 + tail
        assert after.prefix_queried_tokens - before.prefix_queried_tokens == 815 + tail
        assert after.used_blocks == 0


@pytest.mark.parametrize(("prompt", "copied"), [(9, 0), (10, 1), (11, 2), (12, 3)])
def test_of_the_same_prompt_one_token_is_computed(prompt, copied):
    """The last block of the first one is not full, unless its length is a whole number of them."""
    sched = scheduler(block_size=4)
    plans, [output] = run(sched, request("a", range(1, prompt + 1), max_tokens=1))
    assert (planned(plans[0]), plans[0].copies) == ([("a0", 0, prompt)], ())
    assert output.cached_tokens == 0
    plans, [output] = run(sched, request("b", range(1, prompt + 1), max_tokens=1))
    assert planned(plans[0]) == [("b0", prompt - 1, 1)]
    assert [copy.tokens for copy in plans[0].copies] == [copied][:copied]
    assert output.cached_tokens == prompt - 1


def test_the_next_turn_of_a_chat_reuses_the_answer():
    sched = scheduler()
    run(sched, request("a", [1, 2, 3], max_tokens=4))
    plans, _ = run(sched, request("b", [1, 2, 3, 5, 5, 5, 5, 9], max_tokens=1))
    # The last token of the answer was sampled and never computed.
    assert begins(plans) == {"b0": 6}


def test_a_short_prompt_in_common_is_not_worth_a_copy():
    sched = scheduler(block_size=8, least=4)
    assert begins(run(sched, request("x", [1, 2], max_tokens=1))[0]) == {"x0": 0}
    assert len(sched.pool.index) == 0
    run(sched, request("a", range(1, 10), max_tokens=1))
    assert begins(run(sched, request("b", [1, 2, 3, 9, 9]))[0]) == {"b0": 0}
    assert begins(run(sched, request("c", [1, 2, 3, 4, 9]))[0]) == {"c0": 4}


def test_without_an_index_nothing_is_reused():
    sched = Scheduler(BlockPool(16, 2), 4, 16, 16, frozenset({0}))
    run(sched, request("a", range(1, 8)))
    plans, outputs = run(sched, request("b", range(1, 8)))
    assert begins(plans) == {"b0": 0}
    assert not any(output.cached_tokens for output in outputs)
    statistics = sched.statistics()
    assert statistics.prefix_queried_tokens == statistics.cached_blocks == 0


def test_only_the_same_salt_finds_it():
    sched = scheduler()
    run(sched, salted("mine", "a", range(1, 8)))
    assert begins(run(sched, salted("yours", "b", range(1, 8)))[0]) == {"b0": 0}
    assert begins(run(sched, request("c", range(1, 8)))[0]) == {"c0": 0}
    assert begins(run(sched, salted("mine", "d", range(1, 8)))[0]) == {"d0": 6}


def test_a_twin_computes_what_is_not_computed_when_it_comes_in_and_the_double_is_given_back():
    sched = scheduler(budget=8)
    sched.add(request("a", range(1, 6), max_tokens=9))
    sched.add(request("b", range(1, 6), max_tokens=9))
    assert planned(step(sched)[0]) == [("a0", 0, 5), ("b0", 0, 3)]
    # Of b's blocks one was full, and a's has taken its place.
    assert sched.statistics().used_blocks == 3 + 2
    step(sched)
    assert sched.statistics().used_blocks == 2 + 1 + 1
    sched.add(request("c", range(1, 6), max_tokens=9))
    assert ("c0", 4, 1) in planned(step(sched)[0])


def test_a_prompt_that_is_half_computed_lends_that_half():
    sched = scheduler(budget=4, block_size=2)
    sched.add(request("a", range(1, 12)))
    step(sched)
    sched.abort(RequestId("a"))
    assert sched.statistics().used_blocks == 0
    assert begins(run(sched, request("b", range(1, 12)))[0]) == {"b0": 4}


def test_who_scores_its_prompt_computes_it_all_and_others_reuse_it():
    sched = scheduler()
    run(sched, request("a", range(1, 8)))
    plans, outputs = run(sched, request("b", range(1, 8), n=2, prompt_logprobs=0))
    assert begins(plans) == {"b0": 0, "b1": 6}
    assert outputs[0].prompt_logprobs == tuple(prompt_score(p + 1, p) for p in range(1, 7))
    assert not any(output.cached_tokens for output in outputs)
    assert sched.statistics().prefix_queried_tokens == 7
    assert begins(run(sched, request("c", range(1, 8)))[0]) == {"c0": 6}


def test_the_cached_tokens_of_a_request_are_those_of_its_beginning():
    sched = scheduler(rows=2)
    run(sched, request("warm", range(1, 6), max_tokens=1))
    sched.add(request("a", range(1, 8), n=2, max_tokens=2))
    plan = sched.plan()
    assert planned(plan) == [("a0", 5, 2)]
    sched.pause(RequestId("a"))
    first = sched.apply(plan, sampled(5))
    sched.resume(RequestId("a"))
    _, rest = run(sched)
    assert [output.cached_tokens for output in (*first, *rest)] == [5, 0, 0, 0]
    assert sched.statistics().prefix_hit_tokens == 5


def test_a_preempted_sequence_finds_its_own_and_reports_its_beginning():
    sched = scheduler(blocks=8, rows=1, budget=16)
    sched.add(request("a", range(1, 8), max_tokens=3))
    step(sched)
    sched.pause(RequestId("a"))
    run(sched, request("b", range(20, 31), max_tokens=1))  # 6 blocks, with 5 that hold nothing
    assert names(sched._roster.parked) == ["a"]
    sched.resume(RequestId("a"))
    # Of the 3 that it had full the last was handed out.
    plan, [output] = step(sched)
    assert planned(plan) == [("a0", 4, 4)]
    assert output.cached_tokens == 0


def test_a_tenant_is_charged_for_what_is_computed():
    sched = scheduler()
    run(sched, request("warm", range(1, 8), max_tokens=1, tenant="other"))
    sched.add(request("a", range(1, 8), max_tokens=9))
    account = sched._roster.waiting.head().account
    before = account.counter
    step(sched)
    assert account.counter == before + 1 + 2


def test_a_failed_step_leaves_nothing_known():
    sched = scheduler()
    run(sched, request("a", range(1, 8)))
    sched.add(request("b", range(1, 8)))
    sched.add(request("c", range(1, 8), tenant="c"))
    sched.pause(RequestId("c"))
    step(sched)
    assert sched.fail(sched.plan()) == ["b"]
    sched.check()
    assert sched.statistics().cached_blocks == len(sched.pool.index) == 0
    sched.resume(RequestId("c"))
    assert begins(run(sched)[0]) == {"c0": 0}


def test_of_numbers_that_are_not_finite_nothing_stays_known():
    sched = scheduler(budget=4)
    run(sched, request("other", [1, 2], max_tokens=1))
    bad = tuple(range(1, 10))
    sched.add(request("bad", bad, n=2))
    step(sched)
    assert len(sched.pool.index.match("", bad)) == 3
    plan = sched.plan()
    assert planned(plan) == [("bad0", 6, 3)]
    sched.abort(RequestId("bad"), unsound=True)
    sched.check()
    assert sched.apply(plan, sampled(5)) == []
    sched.check()
    # What it has found is another's, who has got an answer from it.
    assert [place.ids for place in sched.pool.index.match("", bad)] == [(1, 2)]
    assert sched.statistics().used_blocks == 0


def test_not_even_a_block_that_is_not_full():
    sched = scheduler(block_size=4)
    sched.add(request("bad", range(1, 4)))
    plan = sched.plan()
    sched.abort(RequestId("bad"), unsound=True)
    sched.apply(plan, sampled(5))
    assert len(sched.pool.index) == 0


def test_what_a_step_computed_under_an_abort_is_known():
    sched = scheduler()
    sched.add(request("a", range(1, 8)))
    plan = sched.plan()
    sched.abort(RequestId("a"))
    sched.apply(plan, sampled(5))
    assert begins(run(sched, request("b", range(1, 8)))[0]) == {"b0": 6}


def test_who_shares_what_is_made_unknown_keeps_its_blocks_and_teaches_nothing():
    sched = scheduler(budget=6)
    sched.add(request("bad", range(1, 10), max_tokens=1))
    step(sched)
    sched.add(request("twin", range(1, 10), max_tokens=3))
    plan = sched.plan()
    assert planned(plan) == [("bad0", 6, 3), ("twin0", 6, 3)]
    sched.abort(RequestId("bad"), unsound=True)
    sched.check()
    sched.apply(plan, sampled(5, 5))
    sched.check()
    assert len(sched.pool.index) == 0
    run(sched)
    assert len(sched.pool.index) == sched.statistics().cached_blocks == 0
    assert sched.statistics().used_blocks == 0


def test_a_block_can_be_written_in_the_step_that_copies_from_it():
    """The only free blocks are those that are known, and the copied one is the oldest of them."""
    sched = scheduler(blocks=8, block_size=2, rows=2)
    model = PagedModel(2)

    def serve(one):
        sched.add(one)
        produced, plans = [], []
        while sched.has_work:
            plans.append(sched.plan())
            for output in sched.apply(plans[-1], model.run(plans[-1])):
                produced += output.token_ids
            sched.check()
        assert produced == solo(one, 0, 16)[0]
        return plans

    serve(request("a", [1, 2, 3, 4], max_tokens=1))
    [source] = [p.block for p in sched.pool.index.match("", (1, 2, 3, 4, 9))][1:]
    serve(request("b", range(20, 31), max_tokens=1))
    plan = serve(request("c", [1, 2, 3, *[9] * 12], max_tokens=1))[0]
    [copy] = plan.copies
    assert (copy.source, copy.tokens) == (source, 1)
    assert source in plan.chunks[0].blocks


def test_blocks_that_two_paused_requests_share_come_free_for_whoever_waits():
    sched = scheduler(blocks=8, rows=3)
    for name in "ab":
        sched.add(request(name, range(1, 8), max_tokens=9))
        step(sched)
    for name in "ab":
        sched.pause(RequestId(name))
    sched.add(request("c", range(20, 35), max_tokens=1))  # 8 blocks: all there are
    assert planned(step(sched)[0]) == [("c0", 0, 15)]
    assert sorted(names(sched._roster.parked)) == ["a", "b"]


def test_blocks_that_a_paused_request_shares_with_one_that_runs_do_not_come_free():
    sched = scheduler(blocks=8, rows=3)
    sched.add(request("a", range(1, 8), max_tokens=9))
    step(sched)
    sched.pause(RequestId("a"))
    sched.add(request("b", range(1, 8), max_tokens=9))
    step(sched)
    # 3 shared, one each: without a there would be 4 free, less the one kept for b.
    sched.add(request("c", range(20, 27), max_tokens=1))
    assert planned(step(sched)[0]) == [("b0", 7, 1)]
    assert names(sched._roster.parked) == []


def test_what_the_head_shares_with_a_paused_request_is_not_counted_twice():
    sched = scheduler(blocks=8, rows=3)
    sched.add(request("a", range(1, 8), max_tokens=9))
    step(sched)
    sched.add(request("hold", [20, 21, 22], max_tokens=9))
    step(sched)
    sched.pause(RequestId("a"))
    # a has 4 or 5, of which 3 are shared then; hold has 2; one is to stay free for it.
    sched.add(request("c", (*range(1, 7), *range(30, 33)), max_tokens=1))
    plan, _ = step(sched)
    assert planned(plan)[-1][:2] == ("c0", 6)
    sched.check()


def test_a_choice_that_ends_at_once_leaves_a_prompt_that_fills_its_blocks_to_the_next():
    sched = scheduler(rows=1)
    plans, outputs = run(sched, request("a", range(1, 9), n=3, max_tokens=1))
    chunks = [planned(plan) for plan in plans]
    assert chunks == [[("a0", 0, 8)], [("a1", 7, 1)], [("a2", 7, 1)]]
    assert [plan.copies for plan in plans] == [(), (), ()]
    assert [output.choice for output in outputs] == [0, 1, 2]


def test_the_next_choice_writes_to_no_block_that_another_request_shares():
    sched = scheduler(rows=2, budget=4)
    sched.add(request("b", range(1, 12), max_tokens=9))
    step(sched)
    sched.add(request("a", range(1, 5), n=2, max_tokens=1, prompt_logprobs=0))
    while "a" not in [output.request_id for output in step(sched)[1]]:
        pass
    # b has the block with the last token of a's prompt too: a1 copies it.
    sched.abort(RequestId("b"))
    while sched.has_work:
        plan, _ = step(sched)
    assert planned(plan) == [("a1", 3, 1)]
    assert [copy.tokens for copy in plan.copies] == [1]


def test_choices_of_a_found_prompt_share_it_at_once():
    sched = scheduler()
    run(sched, request("warm", range(1, 8), max_tokens=1))
    sched.add(request("a", range(1, 8), n=3, max_tokens=2))
    assert planned(step(sched)[0]) == [("a0", 6, 1), ("a1", 6, 1), ("a2", 6, 1)]


def test_a_copy_is_planned_before_all_chunks_and_names_its_blocks():
    sched = scheduler(block_size=4)
    run(sched, request("a", range(1, 9), max_tokens=1))
    sched.add(request("b", [1, 2, 3, 4, 5, 6, 9, 9]))
    plan = sched.plan()
    target = plan.chunks[0].blocks[1]
    [source] = [p.block for p in sched.pool.index.match("", tuple(range(1, 10)))][1:]
    assert plan.copies == (BlockCopy(source, target, 2),)
    assert sched.pool.owners(target) == 1
    sched.apply(plan, StepSamples((Sample(5),)))
    sched.check()
