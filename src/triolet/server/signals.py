"""Stop signals as values to wait for, in place of ``KeyboardInterrupt`` in a random task."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

#: What a terminal and what a supervisor (systemd, Docker, Kubernetes) sends first.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def open_stop_signals() -> Iterator[AsyncIterator[signal.Signals]]:
    """Catch SIGINT and SIGTERM inside the block, and give them out in order of arrival.

    The first one means: begin the drain. Any further one means: cancel at once. Must be
    entered in the main thread. A signal that was not taken when the block ends is delivered
    again with its former handler.

    Example::

        with open_stop_signals() as signals:
            await anext(signals)
            begin_drain()
            await anext(signals)
            scope.cancel("second stop signal")
    """
    with trio.open_signal_receiver(*STOP_SIGNALS) as received:
        yield _StopSignals(received)


class _StopSignals:
    """Trio's receiver, with ``signal.Signals`` for the bare numbers."""

    def __init__(self, received: AsyncIterator[int]) -> None:
        self._received = received

    def __aiter__(self) -> _StopSignals:
        return self

    async def __anext__(self) -> signal.Signals:
        return signal.Signals(await anext(self._received))
