"""A whole Triolet server inside your own Trio program, over real sockets.

Run ``python examples/01_serve_scripted_app.py``.

You will see the server's address, its answer to one request, and the line that says that it has
stopped: engine, requests and connections live in nurseries of this program, so nothing is left.
"""

from __future__ import annotations

from functools import partial

import httpx2
import trio

from triolet.config import Config
from triolet.runtime.lifecycle import Runtime, Served
from triolet.server.app import create_app
from triolet.server.listen import ListenOptions, serve
from triolet.testing.engine import ScriptedBackend, say, serve_script


async def load() -> Served:
    """Stand in for what takes a real model half a minute; the port answers 503 meanwhile."""
    await trio.lowlevel.checkpoint()
    return serve_script(ScriptedBackend(say("The way back is the way."), step_s=0.01))


async def main() -> None:
    """Serve, ask once, drain."""
    config = Config()
    runtime = Runtime(
        load,
        max_live_requests=16,
        max_undelivered_bytes=config.max_stream_buffer,
        max_request_timeout_s=config.request_timeout,
        drain_timeout_s=config.drain_timeout,
    )
    app = create_app(runtime, config)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runtime.run)
        # The server stops when the trigger returns: after the drain, not at its beginning.
        (address,) = await nursery.start(
            partial(serve, app, ListenOptions(port=0), shutdown_trigger=runtime.wait_stopped)
        )
        await runtime.wait_started()
        print(f"serving on {address}")
        async with httpx2.AsyncClient(base_url=address) as client:
            response = await client.post(
                "/v1/chat/completions",
                json={"model": "scripted", "messages": [{"role": "user", "content": "Hello"}]},
            )
        body = response.json()
        print(f"{response.status_code}: {body['choices'][0]['message']['content']}")
        print(f"{body['usage']['completion_tokens']} output tokens")
        runtime.drain()
    print(f"stopped: {runtime.phase.value}")


if __name__ == "__main__":
    trio.run(main)
