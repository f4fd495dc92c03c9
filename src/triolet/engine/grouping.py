"""Which decode rows read their keys and values together.

A row's pages are first copied out of the pool, then multiplied. On a CPU the copy of all rows of a
large batch is gone from the cache before it is multiplied, and a batch of uneven rows is padded to
the longest. So rows are read in groups of like length, each as large as the cache bears. On two
AVX-512 cores attention over 32 rows takes two thirds of the time, at 256 and at 1,024 tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.engine.kv import KvPool

#: Bytes of keys, per thread, that a group copies; as many of values come on top. Half and twice
#: as many are within a tenth of it.
GROUP_BYTES: Final = 2**21


def group_rows(pages: Sequence[int], pool: KvPool) -> list[slice]:
    """Cut rows into groups.

    Args:
        pages: How many pages each row reads, at least one.
        pool: Where they are. A GPU reads all rows at once.
    """
    if pool.device.type != "cpu":
        return [slice(0, len(pages))] if pages else []
    most = torch.get_num_threads() * GROUP_BYTES // pool.key_pages[0][:1].nbytes
    groups = []
    begin = widest = 0
    for row, count in enumerate(pages):
        widest = max(widest, count)
        if row > begin and widest * (row + 1 - begin) > most:
            groups.append(slice(begin, row))
            begin, widest = row, count
    return [*groups, slice(begin, len(pages))] if pages else []
