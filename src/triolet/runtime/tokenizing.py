"""Tokenizing without stopping the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

#: Text up to here is tokenized in well under a millisecond, less than a thread's round trip
#: is worth; anything longer leaves the event loop free for other people's tokens.
INLINE_CHARACTERS = 2048


@attrs.define(eq=False)
class TokenizerGate:
    """Lets one caller at a time use the tokenizer, long texts in a worker thread."""

    # A slot of its own, so that a flood of long prompts cannot starve other uses of threads.
    _limiter: trio.CapacityLimiter = attrs.field(
        factory=lambda: trio.CapacityLimiter(1), init=False
    )

    async def run(self, work: Callable[[], T], *, characters: int) -> T:
        """The result of ``work``, which tokenizes about so many characters."""
        if characters <= INLINE_CHARACTERS and not self._limiter.borrowed_tokens:
            await trio.lowlevel.checkpoint()
            return work()
        return await trio.to_thread.run_sync(
            work,
            limiter=self._limiter,
            # Nobody waits for the tokens of a client that has gone. The thread goes on to the
            # end of its text, and holds the slot for so long.
            abandon_on_cancel=True,
        )
