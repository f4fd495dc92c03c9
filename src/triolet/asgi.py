"""The app for ASGI servers: ``hypercorn -k trio triolet.asgi:app``.

Configured by environment variables alone. ``triolet serve`` does more: it bounds a client that
stops reading on every protocol, drains before it closes connections, and exits non-zero when
the engine dies. Run one worker: each would load the model.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from triolet.cli.models import create_runtime
from triolet.config import load_config
from triolet.observe.logs import configure_logging
from triolet.server.app import create_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.applications import Starlette

_config = load_config()
configure_logging(
    level=_config.log_level, log_format=_config.log_format, requests=_config.access_log
)
_runtime = create_runtime(_config)


@asynccontextmanager
async def _lifespan(_: Starlette) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(_runtime.run)
        yield
        # The server has closed all connections by now, so nothing is left to wait for.
        _runtime.drain()
        _runtime.drain()
        await _runtime.wait_stopped()
        nursery.cancel_scope.cancel(reason="the server has stopped")


app = create_app(_runtime, _config, lifespan=_lifespan)
