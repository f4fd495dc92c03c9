from __future__ import annotations

import json

from triolet.testing.asgi import open_server
from triolet.testing.engine import ScriptedBackend, say, serve_script
from triolet.wire.sse import SseDecoder

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}


def events(body: bytes) -> list[object]:
    decoder = SseDecoder()
    found = decoder.feed(body)
    decoder.finish()
    return [e.data if e.data == "[DONE]" else json.loads(e.data) for e in found]


async def test_a_stream_ends_with_finish_and_done(autojump_clock):
    served = serve_script(ScriptedBackend(say("Hello 👋"), step_s=0.1))
    async with open_server(served) as server:
        response = await server.client.request(
            "POST", "/v1/chat/completions", json_body={**CHAT, "stream": True}
        )
    print(response)
    found = events(response.body)
    assert found[-1] == "[DONE]"
    assert response.complete
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in found[:-1])
    assert text == "Hello 👋"
