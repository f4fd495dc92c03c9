"""A request's log with a bell: the pump appends, one reader waits and takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from triolet.stream.log import StreamLog

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triolet.output.events import OutputEvent


@attrs.define(eq=False)
class StreamHub:
    """Wakes the reader of a :class:`~triolet.stream.log.StreamLog` when there is something to take.

    Appending never waits, so the pump from the engine never waits for a client.
    """

    log: StreamLog = attrs.field(factory=StreamLog)
    _bell: trio.Event = attrs.field(factory=trio.Event, init=False)

    def append(self, events: Iterable[OutputEvent]) -> None:
        """Add events in order and wake the reader."""
        for event in events:
            self.log.append(event)
            self._bell.set()

    async def take(self) -> list[tuple[int, OutputEvent]]:
        """Wait for undelivered events and take them all, with their numbers.

        The last event of a request is its terminal one; who waits after that waits for ever.
        Cancelling loses nothing: what was not returned is taken by the next call.
        """
        await self._bell.wait()
        self._bell = trio.Event()
        return self.log.take()
