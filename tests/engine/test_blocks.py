from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.engine.blocks import BlockPool
from triolet.errors import ConfigError, EngineError


def test_allocation_is_all_or_nothing():
    pool = BlockPool(total_blocks=3, block_size=4)
    assert pool.allocate(4) is None
    assert pool.used_blocks == 0
    blocks = pool.allocate(3)
    assert sorted(blocks) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_freed_blocks_can_be_had_again():
    pool = BlockPool(total_blocks=2, block_size=4)
    pool.free(pool.allocate(2))
    assert pool.used_blocks == 0
    assert sorted(pool.allocate(2)) == [0, 1]


@pytest.mark.parametrize(
    "blocks", [[1], [0, 0], [0, 1], [0, 2], [0, -1]], ids=["free", "twice", "one", "big", "small"]
)
def test_a_wrong_free_is_an_error_and_frees_nothing(blocks):
    pool = BlockPool(total_blocks=2, block_size=4)
    assert pool.allocate(1) == [0]
    with pytest.raises(EngineError, match="freed twice"):
        pool.free(blocks)
    assert pool.used_blocks == 1
    pool.check()


def test_a_double_free_is_an_error():
    pool = BlockPool(total_blocks=2, block_size=4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(EngineError):
        pool.free(blocks)


def test_a_shared_block_is_free_when_its_last_owner_gives_it_back():
    pool = BlockPool(total_blocks=3, block_size=4)
    blocks = pool.allocate(2)
    pool.share(blocks[:1])
    assert (pool.used_blocks, pool.owners(blocks[0]), pool.owners(blocks[1])) == (2, 2, 1)
    pool.free(blocks)
    assert (pool.used_blocks, pool.owners(blocks[0]), pool.owners(blocks[1])) == (1, 1, 0)
    assert blocks[0] not in pool.allocate(2)
    pool.free(blocks[:1])
    assert pool.allocate(1) == blocks[:1]
    pool.free(blocks[:1])
    with pytest.raises(EngineError, match="freed twice"):
        pool.free(blocks[:1])
    pool.check()


@pytest.mark.parametrize(
    "blocks", [[1], [0, 0], [0, 1], [0, 2], [-1]], ids=["free", "twice", "one", "big", "small"]
)
def test_only_blocks_with_an_owner_can_be_shared(blocks):
    pool = BlockPool(total_blocks=2, block_size=4)
    assert pool.allocate(1) == [0]
    with pytest.raises(EngineError, match="shared while they were free"):
        pool.share(blocks)
    assert pool.owners(0) == 1


def test_a_negative_allocation_is_an_error():
    with pytest.raises(EngineError):
        BlockPool(total_blocks=2, block_size=4).allocate(-1)


@pytest.mark.parametrize(("total", "size"), [(0, 4), (4, 0)])
def test_a_pool_that_holds_nothing_is_refused(total, size):
    with pytest.raises(ConfigError, match="at least 1"):
        BlockPool(total_blocks=total, block_size=size)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_a_block_begun_is_a_block_needed(tokens, blocks):
    assert BlockPool(total_blocks=1, block_size=4).blocks_for(tokens) == blocks


def test_the_check_sees_books_that_disagree():
    pool = BlockPool(total_blocks=2, block_size=4)
    pool._owners[0] = 1
    with pytest.raises(EngineError, match="disagree"):
        pool.check()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=20))
def test_a_block_has_as_many_owners_as_took_it_and_free_ones_none(acts):
    pool = BlockPool(total_blocks=12, block_size=1)
    owned: list[list[int]] = []
    for shares, size in acts:
        if shares and owned:
            blocks = owned[size % len(owned)][: size + 1]
            pool.share(blocks)
        else:
            blocks = pool.allocate(size)
        if blocks is None:
            assert size > pool.free_blocks
            pool.free(owned.pop(len(owned) // 2))
        else:
            owned.append(blocks)
        owners = Counter(block for blocks in owned for block in blocks)
        assert len(owners) == pool.used_blocks == 12 - pool.free_blocks
        assert all(pool.owners(block) == owners[block] for block in range(12))
        pool.check()
