"""Which KV blocks hold what, so that a prompt that begins like another need not compute it. Pure.

Theory of operation. The keys and values of a token depend on the ids up to it and on nothing else
of its request. So a block is known by its own ids and by the block before it, and all blocks that
are known form a tree: a path from a root spells what a sequence begins with. Every salt has a
root of its own, and no path leads from one to another.

Kwon et al. ("Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023) share blocks between sequences, and vLLM finds them by a hash over the chain. Zheng et
al. ("SGLang: Efficient Execution of Structured Language Model Programs", 2024) keep them in a
radix tree. This is such a tree with blocks as its letters: a step down compares all ids of a
block, so that no two contents are ever taken for each other, however somebody chose their hashes.

Rules
-----

1.  A block stands for one place in the tree, and a place has one block. One that is not full has
    nothing below it, and is there to be copied from.
2.  Who leaves takes along all below. Such places are dead for good: who holds one knows no more of
    what it has computed.

Who owns a block, and which one is thrown out first, is :class:`~triolet.engine.blocks.BlockPool`'s
to know.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Tokens of a block that are worth a copy. A copy takes a twentieth of the time that a token takes
#: (0.23 and 5 ms, packaged model, one CPU core), so any number would be. But all prompts of a model
#: begin with the same token, and to have that one alone in common is no reason to copy a page.
MIN_COPIED_TOKENS: Final = 2


@attrs.define(eq=False)
class Place:
    """One block in the tree; a root has no block and no ids."""

    parent: Place | None = attrs.field(default=None, repr=False)
    salt: str = ""
    ids: tuple[int, ...] = ()
    block: int = -1
    alive: bool = True
    below: dict[tuple[int, ...], Place] = attrs.field(factory=dict, init=False, repr=False)
    #: The keys of ``below``, sorted: the one most like a given block stands next to it.
    order: list[tuple[int, ...]] = attrs.field(factory=list, init=False, repr=False)

    def add(self, ids: tuple[int, ...], block: int) -> Place:
        """Put a block below this place, where there is none of that content."""
        place = self.below[ids] = Place(self, self.salt, ids, block)
        insort(self.order, ids)
        return place

    def drop(self, ids: tuple[int, ...]) -> None:
        """Undo :meth:`add`."""
        del self.below[ids]
        del self.order[bisect_left(self.order, ids)]

    def nearest(self, wanted: tuple[int, ...]) -> tuple[Place | None, int]:
        """Of the blocks below, one that begins most like ``wanted``, and for how many ids."""
        at = bisect_left(self.order, wanted)
        found, most = None, 0
        for ids in self.order[max(0, at - 1) : at + 1]:
            same = _same(ids, wanted)
            if same > most:
                found, most = self.below[ids], same
        return found, most


@attrs.define(eq=False)
class PrefixIndex:
    """The tree of all blocks whose content is known.

    ``block_size`` is in tokens. With ``least`` tokens in common with what a prompt goes on with, a
    block is worth a copy.
    """

    block_size: int
    least: int = MIN_COPIED_TOKENS
    _roots: dict[str, Place] = attrs.field(factory=dict, init=False, repr=False)
    _places: dict[int, Place] = attrs.field(factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, block: object) -> bool:
        return block in self._places

    def match(self, salt: str, ids: tuple[int, ...]) -> list[Place]:
        """The longest path that ``ids`` begin with, less their last: that one is to be computed."""
        found: list[Place] = []
        place = self._roots.get(salt)
        size = self.block_size
        for end in range(size, len(ids), size):
            place = place and place.below.get(ids[end - size : end])
            if place is None:
                break
            found.append(place)
        return found

    def fork(self, salt: str, path: list[Place], ids: tuple[int, ...]) -> tuple[Place | None, int]:
        """The block that goes on from ``path`` most like ``ids`` do, and for how many tokens.

        At most up to the last but one of ``ids``. ``None`` where no block is worth a copy.
        """
        last = path[-1] if path else self._roots.get(salt)
        start = len(path) * self.block_size
        wanted = ids[start : min(start + self.block_size, len(ids) - 1)]
        if last is None or len(wanted) < self.least:
            return None, 0
        found, same = last.nearest(wanted)
        return (found, same) if same >= self.least else (None, 0)

    def enter(self, salt: str, last: Place | None, ids: tuple[int, ...], block: int) -> Place:
        """The place of a block after ``last``; the block itself takes it if it is free.

        ``last`` is alive, or ``None`` at the beginning. Nobody may write to ``block`` from now on.
        """
        if last is None:
            last = self._roots.setdefault(salt, Place(salt=salt))
        place = last.below.get(ids)
        if place is None:
            place = self._places[block] = last.add(ids, block)
        return place

    def leave(self, place: Place) -> list[int]:
        """Take a place and all below it out of the tree; the blocks that are unknown now."""
        if place.parent is not None:
            place.parent.drop(place.ids)
            if not place.parent.below and place.parent.parent is None:
                self._roots.pop(place.salt, None)
        gone = []
        todo = [place]
        while todo:
            lost = todo.pop()
            lost.alive = False
            lost.parent = None
            del self._places[lost.block]
            gone.append(lost.block)
            todo += lost.below.values()
        return gone

    def clear(self) -> None:
        """Forget everything."""
        for place in self._places.values():
            place.alive, place.parent = False, None
        self._places.clear()
        self._roots.clear()

    def place(self, block: int) -> Place:
        """Where a block stands that the tree has."""
        return self._places[block]

    def violations(self) -> Iterator[tuple[bool, str]]:
        """Rules, and whether each is broken. O(all blocks): for tests and diagnosis."""
        seen = {}
        todo = list(self._roots.values())
        yield not all(root.below for root in todo), "no root without blocks"
        while todo:
            place = todo.pop()
            yield not place.alive, "what stands in the tree is alive"
            yield sorted(place.below) != place.order, "blocks are found by what they begin with"
            for ids, below in place.below.items():
                seen[below.block] = below
                todo.append(below)
                yield below.parent is not place or below.ids != ids, "a place knows its own"
                yield below.salt != place.salt, "a path has one salt"
                room = self.block_size - len(ids)
                yield room < 0 or (room > 0 and bool(below.below)), "only full blocks go on"
        yield seen != self._places, "each block known stands in one place"


def _same(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many ids two runs have in common at their beginning."""
    for count, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return count
    return min(len(one), len(other))
