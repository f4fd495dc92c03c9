"""Read event streams on Trio and stamp each event with the time at which it arrived.

Run ``python examples/02_stream_with_httpx.py``, or name a server: ``… http://127.0.0.1:8000``.

You will see three clients: one reads as events come, one rests after every sixth and finds the
next ones waiting, one leaves in the middle. Each tells how its stream ended: ``done`` after
``[DONE]``, ``error`` after an error event, ``truncated`` after neither.
"""

from __future__ import annotations

import json
import sys
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import httpx2
import trio

from triolet.server.listen import ListenOptions, serve
from triolet.testing.asgi import open_server
from triolet.testing.engine import ScriptedBackend, say, serve_script
from triolet.wire.sse import SseDecoder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def read(client: httpx2.AsyncClient, name: str, *, rest_s: float, leave_after: int) -> None:
    """Read one stream; rest after every sixth event, and leave after so many."""
    model = (await client.get("/v1/models")).json()["data"][0]["id"]
    messages = [{"role": "user", "content": "Tell me about Trio."}]
    body = {"model": model, "stream": True, "max_tokens": 24, "messages": messages}
    decoder, events, ending = SseDecoder(), 0, "truncated"
    sent = trio.current_time()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for piece in response.aiter_bytes():
            at_ms = (trio.current_time() - sent) * 1000
            for event in decoder.feed(piece):
                events += 1
                if event.data == "[DONE]":
                    ending = "done"
                elif "error" in (data := json.loads(event.data)):
                    ending = "error"
                else:
                    print(f"{name:>6} {at_ms:6.0f} ms  {events:2}  {data['choices'][0]['delta']}")
            if events >= leave_after:
                break
            if events % 6 == 0:
                await trio.sleep(rest_s)
    print(f"{name:>6} ended: {ending}, {events} events")


@asynccontextmanager
async def open_address() -> AsyncIterator[str]:
    """Yield the address that was named, or that of a scripted server of our own."""
    if sys.argv[1:]:
        yield sys.argv[1]
        return
    script = serve_script(ScriptedBackend(say("Trio is a library."), step_s=0.02))
    listen = partial(serve, options=ListenOptions(port=0), shutdown_trigger=trio.sleep_forever)
    async with open_server(script) as server, trio.open_nursery() as nursery:
        (address,) = await nursery.start(listen, server.client.app)
        yield address
        nursery.cancel_scope.cancel(reason="the example is over")


async def main() -> None:
    """Run the three clients, one after the other."""
    async with open_address() as url, httpx2.AsyncClient(base_url=url, timeout=60) as client:
        await read(client, "normal", rest_s=0, leave_after=1000)
        await read(client, "slow", rest_s=0.3, leave_after=1000)
        await read(client, "cut", rest_s=0, leave_after=5)


if __name__ == "__main__":
    trio.run(main)
