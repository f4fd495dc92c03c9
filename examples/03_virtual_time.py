"""Test minutes of a slow model in milliseconds: the whole server, no sockets, a clock that jumps.

Run ``python examples/03_virtual_time.py``.

You will see the headers after 10 s, a keep-alive comment every 15 s, then one token in 50 s,
all in the time of Trio's mock clock, and how little time really passed. The jumping clock moves
whenever every task waits, so nothing here sleeps.
"""

from __future__ import annotations

import time

import trio
import trio.testing

from triolet.testing.asgi import open_server
from triolet.testing.engine import ScriptedBackend, say, serve_script

#: Of each line: what changes from chunk to chunk stands at its end.
LINE_END_CHARACTERS = 90
REQUEST = {
    "model": "scripted",
    "stream": True,
    "messages": [{"role": "user", "content": "Take your time."}],
}


async def main() -> None:
    """Read one very slow stream, message by message."""
    model = serve_script(ScriptedBackend(say("Trio"), step_s=50))
    started = trio.current_time()
    async with open_server(model) as server:
        exchange = server.client.start("POST", "/v1/chat/completions", json_body=REQUEST)
        more = True
        while more:
            message = await exchange.next_message()
            elapsed_s = trio.current_time() - started
            if message["type"] == "http.response.start":
                print(f"{elapsed_s:5.0f} s  status {message['status']}")
                continue
            more = message.get("more_body", False)
            for line in message["body"].decode().splitlines():
                if line:
                    print(f"{elapsed_s:5.0f} s  {line[-LINE_END_CHARACTERS:]}")


if __name__ == "__main__":
    began = time.perf_counter()
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    print(f"this took {(time.perf_counter() - began) * 1000:.0f} ms")
