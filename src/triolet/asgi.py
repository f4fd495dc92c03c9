"""The app for ASGI servers: ``hypercorn -k trio triolet.asgi:app``.

Configured by environment variables alone. ``triolet serve`` does more: it bounds a client that
stops reading on every protocol, drains before it closes connections, and exits non-zero when
the engine dies or stalls. Here the worker belongs to the server: an app cannot end it, so it
stays, answers 503 (``/health`` too) and says in the log that only a restart helps. Run one
worker: each would load the model.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from triolet.cli.models import create_runtime
from triolet.config import load_config
from triolet.observe.logs import configure_logging
from triolet.runtime.bridge import EngineThread
from triolet.server.app import create_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.applications import Starlette

logger = logging.getLogger(__name__)

#: Seconds that the worker's shutdown waits for the engine step in flight: longer than a step
#: that ends, and within what supervisors give a shutdown.
WORKER_LAST_STEP_S = 10.0

_config = load_config()
configure_logging(
    level=_config.log_level, log_format=_config.log_format, requests=_config.access_log
)
_runtime = create_runtime(_config)


@asynccontextmanager
async def _lifespan(_: Starlette) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(_runtime.run)
        nursery.start_soon(_say_if_useless)
        yield
        # The server has closed all connections by now, so nothing is left to wait for.
        _runtime.drain()
        _runtime.drain()
        await _runtime.wait_stopped()
        await _wait_for_engine_thread()
        nursery.cancel_scope.cancel(reason="the server has stopped")


async def _say_if_useless() -> None:
    await _runtime.wait_stopped()
    if _runtime.failure is not None:
        logger.critical("this worker answers 503 until it is restarted: %s", _runtime.failure)


async def _wait_for_engine_thread() -> None:
    """An interpreter that shuts down around a computing thread aborts, so give it its time."""
    backend = _runtime.backend()
    if isinstance(backend, EngineThread):
        with trio.move_on_after(WORKER_LAST_STEP_S):
            await backend.wait_returned()
        if backend.abandoned:
            logger.warning("an engine step has not ended; the exit of this worker may abort")
    await trio.lowlevel.checkpoint()


app = create_app(_runtime, _config, lifespan=_lifespan)
