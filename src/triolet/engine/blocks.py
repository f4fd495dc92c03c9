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

    A block has one owner at a time. Both operations do all or nothing.

    Raises:
        ConfigError: The pool has no block, or its blocks no position.
    """

    total_blocks: int
    block_size: int
    # A stack: the block freed last is the likeliest to be still in the processor's cache.
    _free: list[int] = attrs.field(init=False, repr=False)
    # One flag per block. A set would cost a hash per block and step.
    _held: bytearray = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.total_blocks < 1 or self.block_size < 1:
            raise ConfigError(
                f"A KV pool of {self.total_blocks} blocks of {self.block_size} tokens holds "
                "nothing; both numbers must be at least 1."
            )
        self._free = list(range(self.total_blocks - 1, -1, -1))
        self._held = bytearray(self.total_blocks)

    @property
    def free_blocks(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks with an owner."""
        return self.total_blocks - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks that many tokens take."""
        return -(-tokens // self.block_size)

    def held(self, block: int) -> bool:
        """Whether the block has an owner."""
        return bool(self._held[block])

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks, or none at all and return ``None`` where there are too few."""
        if count < 0:
            raise EngineError(f"Cannot allocate {count} KV blocks.")
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._held[block] = 1
        return blocks

    def free(self, blocks: Collection[int]) -> None:
        """Give blocks back.

        Raises:
            EngineError: A block is not of this pool, is free already or is named twice.
                Nothing was freed then.
        """
        unknown = [b for b in blocks if not 0 <= b < self.total_blocks or not self._held[b]]
        if unknown or len(set(blocks)) != len(blocks):
            raise EngineError(f"KV blocks were freed twice or were never allocated: {blocks}.")
        for block in blocks:
            self._held[block] = 0
        self._free.extend(blocks)

    def check(self) -> None:
        """Compare the two books the pool keeps.

        Raises:
            EngineError: They differ.
        """
        free = set(self._free)
        if len(free) != len(self._free) or any(
            (block in free) == self.held(block) for block in range(self.total_blocks)
        ):
            raise EngineError("The KV pool's free list and its flags disagree.")
