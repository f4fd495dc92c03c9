from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.engine.blocks import BlockPool
from triolet.engine.prefix import MIN_COPIED_TOKENS, PrefixIndex
from triolet.errors import EngineError


def grow(pool: BlockPool, ids, *, salt="", known=0):
    """Compute all full blocks of ``ids`` and make them known; the blocks, owned, and the path."""
    size = pool.block_size
    blocks = pool.allocate(len(ids) // size)
    path = []
    for at, block in enumerate(blocks):
        last = path[-1] if path else None
        path.append(pool.enter(salt, last, tuple(ids[at * size : (at + 1) * size]), block))
    return [place.block for place in path], path


def pool_of(total=8, size=2, least=1) -> BlockPool:
    return BlockPool(total, size, index=PrefixIndex(size, least))


def found(pool: BlockPool, ids, salt="") -> list[int]:
    return [place.block for place in pool.index.match(salt, tuple(ids))]


# The tree


def test_a_prompt_finds_the_full_blocks_that_it_begins_with_less_its_last_token():
    pool = pool_of()
    blocks, _ = grow(pool, [1, 2, 3, 4, 5, 6])
    assert found(pool, [1, 2, 3, 4, 5, 6, 7]) == blocks
    assert found(pool, [1, 2, 3, 4, 5, 6]) == blocks[:2]
    assert found(pool, [1, 2, 3, 4, 9, 6, 7]) == blocks[:2]
    assert found(pool, [1, 2]) == found(pool, [2, 1, 3]) == found(pool, [3, 4, 5]) == []


def test_a_block_is_known_by_all_before_it():
    pool = pool_of()
    grow(pool, [1, 2, 7, 7])
    other, _ = grow(pool, [3, 4, 7, 7])
    assert found(pool, [3, 4, 7, 7, 0]) == other
    assert found(pool, [7, 7, 0]) == []


def test_salts_share_nothing():
    pool = pool_of()
    grow(pool, [1, 2, 3, 4], salt="a")
    assert found(pool, [1, 2, 3, 4, 5], salt="b") == found(pool, [1, 2, 3, 4, 5]) == []
    assert pool.index.fork("b", [], (1, 2, 3)) == (None, 0)
    pool.check()


def test_ids_are_compared_and_not_their_hashes():
    pool = pool_of(size=1)
    assert hash((-1,)) == hash((-2,)), "this is what makes the case"
    grow(pool, [-1])
    assert found(pool, [-2, 0]) == []
    assert pool.index.fork("", [], (-2, 0)) == (None, 0)


def test_content_that_is_known_already_is_shared_and_the_double_comes_free():
    pool = pool_of()
    first, _ = grow(pool, [1, 2, 3, 4])
    second, _ = grow(pool, [1, 2, 3, 4])
    assert first == second
    assert pool.used_blocks == 2
    assert [pool.owners(block) for block in first] == [2, 2]
    pool.check()


@pytest.mark.parametrize(
    ("ids", "tokens"),
    [
        ([1, 2, 3, 4, 5, 6, 9, 9], 2),
        ([1, 2, 3, 4, 5, 6, 7, 8], 3),
        ([1, 2, 3, 4, 5, 6, 7], 2),
        ([1, 2, 3, 4, 5, 9, 7], 1),
        ([1, 2, 3, 4, 9, 9, 9], 0),
        ([1, 2, 3, 4, 5], 0),
    ],
)
def test_of_the_next_block_what_is_the_same_is_copied_but_not_the_last_token(ids, tokens):
    pool = pool_of(size=4)
    blocks, _ = grow(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    path = pool.index.match("", tuple(ids))
    place, same = pool.index.fork("", path, tuple(ids))
    assert (place and place.block, same) == (blocks[1] if tokens else None, tokens)


def test_from_a_block_that_is_not_full_what_it_has_is_copied():
    pool = pool_of(size=4)
    blocks, path = grow(pool, [1, 2, 3, 4])
    [rest] = pool.allocate(1)
    pool.index.enter("", path[0], (5, 6), rest)
    pool.check()
    for ids, tokens in ((1, 2, 3, 4, 5, 6, 7, 8, 9), 2), ((1, 2, 3, 4, 5, 6), 1):
        assert found(pool, ids) == blocks
        place, same = pool.index.fork("", path, ids)
        assert (place.block, same) == (rest, tokens)
    pool.free([*blocks, rest])
    assert pool.cached_blocks == 2
    pool.check()


def test_what_saves_too_little_is_not_copied():
    size = 2 * MIN_COPIED_TOKENS
    pool = BlockPool(4, size, index=PrefixIndex(size))
    blocks, _ = grow(pool, range(size))
    enough = (*range(MIN_COPIED_TOKENS), 99, 99)
    assert pool.index.fork("", [], enough)[0].block == blocks[0]
    assert pool.index.fork("", [], enough[1:]) == (None, 0)
    assert pool.index.fork("", [], (*range(MIN_COPIED_TOKENS - 1), 99, 99)) == (None, 0)


@given(
    known=st.sets(
        st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), min_size=1, max_size=12
    ),
    wanted=st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
def test_no_other_block_begins_more_like_the_prompt(known, wanted):
    pool = BlockPool(12, 3, index=PrefixIndex(3, 1))
    for ids in known:
        pool.index.enter("", None, ids, pool.allocate(1)[0])
    pool.check()

    def same(ids):
        pairs = zip(ids, wanted[:-1], strict=False)
        return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))

    place, tokens = pool.index.fork("", [], tuple(wanted))
    assert tokens == max(map(same, known))
    assert tokens == (0 if place is None else same(place.ids))


# Eviction


def test_a_known_block_that_nobody_owns_is_free_and_can_be_found():
    pool = pool_of()
    blocks, _ = grow(pool, [1, 2, 3, 4])
    pool.free(blocks)
    assert (pool.used_blocks, pool.free_blocks, pool.cached_blocks) == (0, 8, 2)
    assert found(pool, [1, 2, 3, 4, 5]) == blocks
    pool.share(blocks)
    assert (pool.used_blocks, pool.cached_blocks) == (2, 0)
    pool.check()


def test_known_blocks_are_handed_out_last_the_longest_unused_first_and_ends_before_beginnings():
    pool = pool_of(total=6)
    old, _ = grow(pool, [1, 2, 3, 4])
    new, _ = grow(pool, [5, 6, 7, 8])
    pool.free(old)
    pool.free(new)
    pool.share(old[:1])  # a prompt that has only this in common
    pool.free(old[:1])
    assert not set(pool.allocate(2)) & {*old, *new}
    assert [pool.allocate(1) for _ in range(4)] == [[old[1]], [new[1]], [new[0]], [old[0]]]
    assert len(pool.index) == pool.cached_blocks == 0
    pool.check()


def test_what_stands_below_a_block_is_forgotten_with_it():
    pool = pool_of()
    blocks, path = grow(pool, [1, 2, 3, 4, 5, 6])
    other, _ = grow(pool, [1, 2, 9, 9])
    pool.free(blocks)
    pool.forget(path[1])
    assert [place.alive for place in path] == [True, False, False]
    assert found(pool, [1, 2, 3, 4, 5, 6, 7]) == blocks[:1]
    assert found(pool, [1, 2, 9, 9, 9]) == other
    assert (pool.used_blocks, pool.cached_blocks, pool.free_blocks) == (2, 0, 6)
    pool.forget(path[0])
    assert not pool.index._roots
    pool.free(other)
    assert (pool.cached_blocks, pool.free_blocks) == (0, 8)
    pool.check()


def test_all_can_be_forgotten_at_once():
    pool = pool_of()
    blocks, path = grow(pool, [1, 2, 3, 4])
    owned, _ = grow(pool, [5, 6], salt="a")
    pool.free(blocks)
    pool.forget_all()
    assert (pool.used_blocks, pool.cached_blocks, pool.free_blocks) == (1, 0, 7)
    assert not any(place.alive for place in path)
    pool.free(owned)
    assert pool.free_blocks == 8
    pool.check()


def test_a_pool_without_an_index_knows_nothing():
    pool = BlockPool(2, 2)
    with pytest.raises(EngineError, match="without an index"):
        pool.enter("", None, (1, 2), 0)
    pool.free(pool.allocate(2))
    assert pool.cached_blocks == 0


def break_order(pool, blocks, path):
    pool.free(blocks)
    pool._cached.move_to_end(blocks[0], last=False)


def break_ownership(pool, blocks, path):
    pool.free(blocks[:1])


def break_books(pool, blocks, path):
    pool.free(blocks)
    del pool._cached[blocks[1]]
    pool._free.append(blocks[1])


def break_tree(pool, blocks, path):
    path[0].below.clear()


def break_search(pool, blocks, path):
    path[0].order.clear()


def break_life(pool, blocks, path):
    path[1].alive = False


def break_size(pool, blocks, path):
    path[0].below[3,] = path[0].below.pop((3, 4))
    path[0].order[:] = [(3,)]
    path[1].ids = (3,)
    path[1].add((5, 6), pool.allocate(1)[0])


def break_salt(pool, blocks, path):
    path[1].salt = "other"


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (break_order, "handed out after"),
        (break_ownership, "owns all above"),
        (break_books, "cached iff"),
        (break_tree, "one place|found by"),
        (break_search, "found by"),
        (break_life, "alive"),
        (break_size, "full blocks go on"),
        (break_salt, "one salt"),
    ],
)
def test_the_check_sees(damage, rule):
    pool = pool_of()
    blocks, path = grow(pool, [1, 2, 3, 4])
    pool.check()
    damage(pool, blocks, path)
    with pytest.raises(EngineError, match=rule):
        pool.check()
