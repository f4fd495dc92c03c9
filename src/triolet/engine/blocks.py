"""The pool of KV blocks, as numbers: who may write where. The tensors are the runner's."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import attrs

from triolet.engine.prefix import PrefixIndex
from triolet.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from triolet.engine.prefix import Place


@attrs.define(eq=False)
class BlockPool:
    """Hands out blocks ``0 .. total_blocks - 1`` of ``block_size`` token positions each.

    A block has one owner when it is handed out, and one more each time it is shared; it is free
    again when the last one gives it back. Who shares a block reads it: writing is for sole owners.
    All operations do all or nothing.

    With an ``index``, a block whose content it knows stays *cached* when it comes free. It counts
    as free and can be had like any other, but is handed out last, the longest unused first, and
    until then it can be shared. Whoever owns a block of the index owns all above it too, and gives
    them back at once, the end of the path first: so of a path that is cached, the end goes before
    what leads to it, and what is handed out has nothing below.

    Raises:
        ConfigError: The pool has no block, or its blocks no position.
    """

    total_blocks: int
    block_size: int
    index: PrefixIndex | None = attrs.field(default=None, kw_only=True, repr=False)
    # A stack: the block freed last is the likeliest to be still in the processor's cache.
    _free: list[int] = attrs.field(init=False, repr=False)
    # Of these there are no owners either; the longest unused first.
    _cached: OrderedDict[int, None] = attrs.field(factory=OrderedDict, init=False, repr=False)
    # One count of owners per block. A dict would cost a hash per block and step.
    _owners: list[int] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.total_blocks < 1 or self.block_size < 1:
            raise ConfigError(
                f"A KV pool of {self.total_blocks} blocks of {self.block_size} tokens holds "
                "nothing; both numbers must be at least 1."
            )
        self._free = list(range(self.total_blocks - 1, -1, -1))
        self._owners = [0] * self.total_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks without an owner, those cached among them."""
        return len(self._free) + len(self._cached)

    @property
    def used_blocks(self) -> int:
        """Blocks with an owner; a shared one counts once."""
        return self.total_blocks - self.free_blocks

    @property
    def cached_blocks(self) -> int:
        """Blocks without an owner whose content is known."""
        return len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks that many tokens take."""
        return -(-tokens // self.block_size)

    def owners(self, block: int) -> int:
        """How many owners the block has."""
        return self._owners[block]

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks, or none at all and return ``None`` where there are too few."""
        if count < 0:
            raise EngineError(f"Cannot allocate {count} KV blocks.")
        if count > self.free_blocks:
            return None
        while len(self._free) < count and self.index is not None:
            # The whole block stays good until a step writes to it, for who copies from it.
            self.forget(self.index.place(next(iter(self._cached))))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def share(self, blocks: Collection[int]) -> None:
        """Give each of these blocks one more owner; those that are cached, their first.

        Raises:
            EngineError: A block is not of this pool, holds nothing or is named twice. Nothing
                was shared then.
        """
        self._expect(blocks, "shared while they were free", cached=self._cached)
        for block in blocks:
            self._cached.pop(block, None)
            self._owners[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back, for one owner of each; a block table in its order.

        Raises:
            EngineError: A block is not of this pool, is free already or is named twice.
                Nothing was freed then.
        """
        self._expect(blocks, "freed twice")
        for block in blocks:
            self._owners[block] -= 1
        unused = [block for block in blocks if not self._owners[block]]
        if self.index is not None:
            self._cached.update((b, None) for b in reversed(unused) if b in self.index)
            unused = [block for block in unused if block not in self.index]
        self._free += unused

    def enter(self, salt: str, last: Place | None, ids: tuple[int, ...], block: int) -> Place:
        """Make the content of an owned block known; see :meth:`.PrefixIndex.enter`.

        Where another block has that content already, it takes the place of this one: the
        caller's share in this one becomes a share in that.

        Raises:
            EngineError: The pool has no index.
        """
        if self.index is None:
            raise EngineError("A pool without an index cannot know what a block holds.")
        place = self.index.enter(salt, last, ids, block)
        if place.block != block:
            self.share((place.block,))
            self.free((block,))
        return place

    def forget(self, place: Place) -> None:
        """Make unknown what a block holds, and all below it."""
        if self.index is None:
            return
        for block in self.index.leave(place):
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def forget_all(self) -> None:
        """Make unknown what any block holds: it is lost."""
        if self.index is not None:
            self.index.clear()
        self._free += self._cached
        self._cached.clear()

    def check(self) -> None:
        """Compare the books the pool keeps.

        Raises:
            EngineError: They differ.
        """
        free = {*self._free, *self._cached}
        if len(free) != self.free_blocks or any(
            (block in free) == (owners > 0) for block, owners in enumerate(self._owners)
        ):
            raise EngineError("The KV pool's free list and its counts of owners disagree.")
        if self.index is not None:
            self._check_index(self.index)

    def _check_index(self, index: PrefixIndex) -> None:
        known = {block for block in range(self.total_blocks) if block in index}
        broken = [rule for fault, rule in index.violations() if fault]
        if known & set(self._free) or not known.issuperset(self._cached):
            broken.append("a free block is cached iff its content is known")
        order = {block: at for at, block in enumerate(self._cached)}
        for block in known:
            above = index.place(block).parent
            if above is None or above.block < 0:
                continue
            if self._owners[block] and not self._owners[above.block]:
                broken.append("who owns a block owns all above it")
            if order.get(above.block, len(order)) < order.get(block, -1):
                broken.append("what leads to a block is handed out after it")
        if broken:
            raise EngineError(f"The prefix cache broke a rule of its own: {broken[0]}.")

    def _expect(self, blocks: Collection[int], fault: str, cached: Collection[int] = ()) -> None:
        unknown = [
            b
            for b in blocks
            if not 0 <= b < self.total_blocks or not (self._owners[b] or b in cached)
        ]
        if unknown or len(set(blocks)) != len(blocks):
            raise EngineError(f"KV blocks were {fault} or were never allocated: {blocks}.")
