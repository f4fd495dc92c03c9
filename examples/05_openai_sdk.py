"""The unmodified OpenAI SDK on Trio: a whole stream, one left early, and a refusal.

Run ``python examples/05_openai_sdk.py``, or name a server: ``… http://127.0.0.1:8000``.

You will see an answer arrive in pieces with its usage at the end, a stream left after three
pieces, and the SDK's exception for a request that the server refuses, with the field at fault.
"""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import openai
import trio

from triolet.server.listen import ListenOptions, serve
from triolet.testing.asgi import open_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def open_address() -> AsyncIterator[str]:
    """Yield the address that was named, or that of a scripted server of our own."""
    if sys.argv[1:]:
        yield sys.argv[1]
        return
    listen = partial(serve, options=ListenOptions(port=0), shutdown_trigger=trio.sleep_forever)
    async with open_server() as server, trio.open_nursery() as nursery:
        (address,) = await nursery.start(listen, server.client.app)
        yield address
        nursery.cancel_scope.cancel(reason="the example is over")


async def main() -> None:
    """Ask three times."""
    messages = [{"role": "user", "content": "What is a triolet?"}]
    async with (
        open_address() as address,
        openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client,
    ):
        model = (await client.models.list()).data[0].id
        create = partial(client.chat.completions.create, model=model, messages=messages)

        print("a whole stream: ", end="")
        options = {"include_usage": True}
        async for chunk in await create(stream=True, stream_options=options, max_tokens=100):
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            else:
                print(f"\n{chunk.usage.completion_tokens} output tokens")

        # `async with`: leaving closes the connection, and that is what cancels the request.
        print("left early: ", end="")
        async with await create(stream=True) as stream:
            for _ in range(3):
                chunk = await anext(stream)
                print(chunk.choices[0].delta.content or "", end="", flush=True)

        try:
            await create(temperature=3)
        except openai.BadRequestError as error:
            print(f"\nrefused: {error.status_code} {error.code}, param {error.param}")
            print(f"  {error.body['message']}")


if __name__ == "__main__":
    trio.run(main)
