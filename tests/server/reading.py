"""Read a response as a client does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from triolet.wire.sse import SseDecoder

if TYPE_CHECKING:
    from triolet.testing.asgi import AsgiResponse

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}


def events(body: bytes) -> list[Any]:
    """The data of all events: JSON, or ``[DONE]``."""
    decoder = SseDecoder()
    found = decoder.feed(body)
    decoder.finish()
    return [event.data if event.data == "[DONE]" else json.loads(event.data) for event in found]


def chunks(response: AsgiResponse) -> list[Any]:
    """The chunks of a stream that ended well."""
    assert response.status == 200, response.body
    found = events(response.body)
    assert found[-1] == "[DONE]"
    assert response.complete
    return found[:-1]


def text(found: list[Any]) -> str:
    """The joined text of chunks."""
    return "".join(
        choice["delta"].get("content", "") for chunk in found for choice in chunk.get("choices", ())
    )


def error(response: AsgiResponse) -> dict[str, Any]:
    """The error of a response that is one, or of a stream that ended in one."""
    if response.headers["content-type"] == "application/json":
        body: Any = response.json()
        return body["error"]
    *_, last = events(response.body)
    return last["error"]


def held(server) -> tuple[int, int, int]:
    """Blocks, rows and live requests that the server holds."""
    statistics = server.runtime.backend().statistics()
    return statistics.used_blocks, statistics.used_rows, server.runtime.live_requests
