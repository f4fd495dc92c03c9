"""The largest memory of a process tree. Linux."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import attrs
import trio

from serving import process_tree

#: Between two looks: a look costs the kernel milliseconds.
SAMPLE_S = 0.5
_KIB = 1024


@attrs.define(eq=False)
class MemoryWatch:
    """The largest memory of a process tree while it is watched, in bytes."""

    root: int
    #: Resident: pages that processes share count in each.
    rss: int = 0
    #: Proportional: pages that processes share are shared out among them.
    pss: int = 0

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            rss, pss = memory(process_tree(self.root))
            self.rss, self.pss = max(self.rss, rss), max(self.pss, pss)
            await trio.sleep(SAMPLE_S)


def memory(pids: list[int]) -> tuple[int, int]:
    """Resident and proportional memory of processes, in bytes."""
    totals = {"Rss": 0, "Pss": 0}
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
                name, _, rest = line.partition(":")
                if name in totals:
                    totals[name] += int(rest.split()[0]) * _KIB
    return totals["Rss"], totals["Pss"]
