"""What the catalogue of faults shares: a server under watch, and what its metrics say."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager

import attrs
import pytest

from triolet.testing.asgi import AsgiServer, open_server
from triolet.testing.counting import CountingBackend
from triolet.testing.engine import ScriptedBackend, serve_script
from triolet.testing.settled import Witness


@pytest.fixture(scope="module", autouse=True)
def _cheap_witness(frozen_heap):
    """A witness looks through the heap after every play."""


@attrs.frozen(eq=False)
class Watched:
    """A server without sockets, and who has watched it from its start."""

    server: AsgiServer
    backend: CountingBackend
    witness: Witness

    @property
    def client(self):
        """Asks the server."""
        return self.server.client

    @property
    def runtime(self):
        """The server's heart."""
        return self.server.runtime

    def outcomes(self) -> list[str]:
        """How requests have ended so far, in the order of their ends."""
        return [record.outcome for record in self.witness.records]

    async def counted(self) -> dict[str, float]:
        """By outcome, the requests that the metrics have counted."""
        body = (await self.client.request("GET", "/metrics")).body.decode()
        prefix = 'triolet_requests_total{outcome="'
        lines = [line for line in body.splitlines() if line.startswith(prefix)]
        pairs = [line.removeprefix(prefix).split('"} ') for line in lines]
        return {outcome: float(count) for outcome, count in pairs if float(count)}


@pytest.fixture
def watched():
    """Opens a server on a scripted backend that is watched; leaving it checks nothing."""
    # Pytest keeps what is logged, and a kept traceback keeps the request that it is of.
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)

    @asynccontextmanager
    async def open_watched(backend: ScriptedBackend | None = None, config=None):
        backend = backend or ScriptedBackend()
        counting = CountingBackend(backend)
        served = attrs.evolve(serve_script(backend), backend=counting)
        async with open_server(served, config) as server:
            yield Watched(server, counting, Witness.of(server.runtime, counting))

    yield open_watched
    logging.disable(before)
