"""The pool of KV blocks, as numbers: who may write where. The tensors are the runner's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from triolet.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from collections.abc import Collection


@attrs.define(eq=False)
class BlockPool:
    """Hands out blocks ``0 .. total_blocks - 1`` of ``block_size`` token positions each.

    A block has one owner when it is handed out, and one more each time it is shared; it is free
    again when the last one gives it back. Who shares a block reads it: writing is for sole owners.
    All operations do all or nothing.

    Raises:
        ConfigError: The pool has no block, or its blocks no position.
    """

    total_blocks: int
    block_size: int
    # A stack: the block freed last is the likeliest to be still in the processor's cache.
    _free: list[int] = attrs.field(init=False, repr=False)
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
        """Blocks without an owner."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks with an owner; a shared one counts once."""
        return self.total_blocks - len(self._free)

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
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def share(self, blocks: Collection[int]) -> None:
        """Give each of these blocks one more owner.

        Raises:
            EngineError: A block is not of this pool, is free or is named twice. Nothing was
                shared then.
        """
        self._expect_owned(blocks, "shared while they were free")
        for block in blocks:
            self._owners[block] += 1

    def free(self, blocks: Collection[int]) -> None:
        """Give blocks back, for one owner of each.

        Raises:
            EngineError: A block is not of this pool, is free already or is named twice.
                Nothing was freed then.
        """
        self._expect_owned(blocks, "freed twice")
        for block in blocks:
            self._owners[block] -= 1
        self._free.extend(block for block in blocks if not self._owners[block])

    def check(self) -> None:
        """Compare the two books the pool keeps.

        Raises:
            EngineError: They differ.
        """
        free = set(self._free)
        if len(free) != len(self._free) or any(
            (block in free) == (owners > 0) for block, owners in enumerate(self._owners)
        ):
            raise EngineError("The KV pool's free list and its counts of owners disagree.")

    def _expect_owned(self, blocks: Collection[int], fault: str) -> None:
        unknown = [b for b in blocks if not 0 <= b < self.total_blocks or not self._owners[b]]
        if unknown or len(set(blocks)) != len(blocks):
            raise EngineError(f"KV blocks were {fault} or were never allocated: {blocks}.")
