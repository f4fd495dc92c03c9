"""What a scheduler has counted since it began, and what it holds, as a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from triolet.core import EngineStatistics

if TYPE_CHECKING:
    from triolet.engine.roster import Roster


@attrs.define(eq=False)
class Counts:
    """By the names that :class:`~triolet.core.EngineStatistics` gives them."""

    steps: int = 0
    preemptions: int = 0
    late_aborts: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0

    def snapshot(self, roster: Roster) -> EngineStatistics:
        """These, and what the roster holds now."""
        pool = roster.pool
        paused = sum(s.paused for s in roster.running)
        return EngineStatistics(
            waiting=len(roster.waiting),
            running=len(roster.running) - paused,
            paused=len(roster.parked) + paused,
            used_blocks=pool.used_blocks,
            total_blocks=pool.total_blocks,
            cached_blocks=pool.cached_blocks,
            used_rows=roster.total_rows - len(roster.free_rows),
            total_rows=roster.total_rows,
            waiting_prompt_tokens=roster.waiting.prompt_tokens,
            **attrs.asdict(self),
        )
