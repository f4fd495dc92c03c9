from __future__ import annotations

import sys

import pytest

from triolet.engine import memory
from triolet.engine.memory import HUGE_PAGE, trim, use_huge_pages


def test_elsewhere_than_on_linux_nothing_is_exchanged(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    trim()
    assert use_huge_pages() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_in_memory_stays_what_it_was(monkeypatch):
    mine = bytearray(range(256)) * (4 * HUGE_PAGE // 256)
    address = id(mine)
    ranges = memory._anonymous()
    # Only a few of a large test process' pages.
    monkeypatch.setattr(memory, "_anonymous", lambda: ranges[-8:])
    assert ranges
    assert all(begin < end for begin, end in ranges)
    assert any(begin <= address < end for begin, end in ranges)
    assert use_huge_pages() % HUGE_PAGE == 0
    assert mine == bytearray(range(256)) * (4 * HUGE_PAGE // 256)
