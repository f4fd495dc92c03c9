"""The tasks of one connection, as Hypercorn's protocol code starts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
import trio.lowlevel
from hypercorn.trio.task_group import TaskGroup, _handle
from hypercorn.typing import ASGIReceiveEvent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hypercorn.config import Config
    from hypercorn.typing import AppWrapper, ASGISendEvent, Scope


#: Nothing follows these; ``receive`` gives them again and again.
DISCONNECTS = ("http.disconnect", "websocket.disconnect")


class ConnectionTasks(TaskGroup):
    """Requests in the group itself, Hypercorn's helpers in a nursery around it.

    Helpers (an HTTP/2 sender, WebSocket pings) have no end of their own that could be relied
    on; whoever owns ``helpers`` cancels them once reader and requests are done.

    A disconnect never waits for room in an app's queue, and ends all waiting for it. Hypercorn
    queues it behind the parts of a body, so an app that answers an upload without reading it
    would wait for itself inside its last ``send``.
    """

    def __init__(self, helpers: trio.Nursery) -> None:
        super().__init__()
        self._helpers = helpers

    async def spawn_app(
        self,
        app: AppWrapper,
        config: Config,
        scope: Scope,
        send: Callable[[ASGISendEvent | None], Awaitable[None]],
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        """Start ``app`` for one request, as Hypercorn does.

        Returns:
            What gives the app its next message, waiting while its queue is full.
        """
        to_app, from_client = trio.open_memory_channel[ASGIReceiveEvent](config.max_app_queue_size)
        last: list[ASGIReceiveEvent] = []

        async def put(message: ASGIReceiveEvent) -> None:
            if message["type"] in DISCONNECTS:
                last.append(message)
                to_app.close()
                await trio.lowlevel.checkpoint()
                return
            try:
                await to_app.send(message)
            except trio.ClosedResourceError:
                await trio.lowlevel.checkpoint()

        async def receive() -> ASGIReceiveEvent:
            try:
                return await from_client.receive()
            except trio.EndOfChannel:
                await trio.lowlevel.checkpoint()
                return last[0]

        assert self._nursery is not None  # noqa: S101 (Hypercorn types it before it is entered)
        self._nursery.start_soon(
            _handle,
            app,
            config,
            scope,
            receive,
            send,
            trio.to_thread.run_sync,
            trio.from_thread.run,
        )
        # A checkpoint could be cancelled, and leave Hypercorn with a stream half made.
        return put  # noqa: ASYNC910

    def spawn(self, func: Callable[..., Awaitable[object]], *args: object) -> None:
        """Start a helper."""
        self._helpers.start_soon(func, *args)
