from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402 - only where torch is
from hypothesis import strategies as st  # noqa: E402 - only where torch is

from triolet.engine import grouping  # noqa: E402 - only where torch is
from triolet.engine.grouping import group_rows  # noqa: E402 - only where torch is
from triolet.engine.kv import KvPool, KvShape  # noqa: E402 - only where torch is

pytestmark = pytest.mark.torch

POOL = KvPool(
    KvShape(num_layers=1, kv_heads=2, head_dim=4),
    num_blocks=1,
    block_size=8,
    dtype=torch.float32,
    device=torch.device("cpu"),
)
PAGE_BYTES = 8 * 2 * 4 * 4


@given(pages=st.lists(st.integers(1, 9), max_size=20), fits=st.integers(1, 40))
def test_groups_cover_all_rows_in_order_and_none_could_take_the_next_row(pages, fits):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping, "GROUP_BYTES", fits * PAGE_BYTES)
        patch.setattr(torch, "get_num_threads", lambda: 1)
        groups = group_rows(pages, POOL)

    assert [row for group in groups for row in range(len(pages))[group]] == [*range(len(pages))]
    for group in groups:
        rows = pages[group]
        assert rows
        assert len(rows) == 1 or max(rows) * len(rows) <= fits
        more = pages[group.start : group.stop + 1]
        assert len(more) == len(rows) or max(more) * len(more) > fits
