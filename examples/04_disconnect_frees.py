"""Leave a stream in the middle, and watch what it held come back.

Run ``python examples/04_disconnect_frees.py``, or name a server: ``… http://127.0.0.1:8000``.

You will see the server's gauges before a stream, during it and after it was cut: live requests,
rows of the batch and blocks of the KV cache go up and come back to where they were, and one more
request is counted as ``cancelled:disconnect``.
"""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import httpx2
import trio

from triolet.server.listen import ListenOptions, serve
from triolet.testing.asgi import open_server
from triolet.testing.engine import ScriptedBackend, say, serve_script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

GAUGES = (
    "triolet_requests_live",
    "triolet_engine_batch_rows_used",
    "triolet_engine_kv_blocks_used",
)
COUNTER = 'triolet_requests_total{outcome="cancelled:disconnect"}'


async def show(client: httpx2.AsyncClient, moment: str) -> None:
    """Print the numbers of this moment."""
    numbers = dict.fromkeys((*GAUGES, COUNTER), "0.0")
    for line in (await client.get("/metrics")).text.splitlines():
        name, _, value = line.rpartition(" ")
        if name in numbers:
            numbers[name] = value
    print(f"{moment}:")
    for name, value in numbers.items():
        print(f"  {name} {value}")


@asynccontextmanager
async def open_address() -> AsyncIterator[str]:
    """Yield the address that was named, or that of a scripted server of our own."""
    if sys.argv[1:]:
        yield sys.argv[1]
        return
    script = serve_script(ScriptedBackend(say(times=100), step_s=0.02))
    listen = partial(serve, options=ListenOptions(port=0), shutdown_trigger=trio.sleep_forever)
    async with open_server(script) as server, trio.open_nursery() as nursery:
        (address,) = await nursery.start(listen, server.client.app)
        yield address
        nursery.cancel_scope.cancel(reason="the example is over")


async def main() -> None:
    """Measure, stream, measure, leave, measure."""
    async with open_address() as url, httpx2.AsyncClient(base_url=url, timeout=60) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        messages = [{"role": "user", "content": "Count to a thousand."}]
        body = {"model": model, "stream": True, "ignore_eos": True, "messages": messages}
        await show(client, "before")
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            pieces = response.aiter_bytes()
            await anext(pieces)
            await show(client, "during")
        # Leaving the block has closed the connection; word of that has to reach the server.
        await trio.sleep(0.2)
        await show(client, "after")


if __name__ == "__main__":
    trio.run(main)
