"""The numbers with which no request has to wait for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triolet.errors import ConfigError

if TYPE_CHECKING:
    from triolet.engine.blocks import BlockPool


def check_limits(
    pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> None:
    """Hold a scheduler's numbers against each other.

    Raises:
        ConfigError: A request could be too large for the pool, or a sequence left out of steps.
    """
    if max_num_seqs < 1 or max_model_len < 2:  # noqa: PLR2004 - one in, one out
        raise ConfigError("max_num_seqs must be at least 1, and max_model_len at least 2.")
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least "
            f"max_num_seqs ({max_num_seqs}), so that every sequence gets its token."
        )
    needed = pool.blocks_for(max_model_len)
    if pool.total_blocks < needed:
        raise ConfigError(
            f"The KV pool has {pool.total_blocks} blocks of {pool.block_size} "
            f"tokens, but one request of max_model_len ({max_model_len}) needs {needed}. "
            "Give the pool more memory or lower max_model_len."
        )
