"""Talks to OpenAI-compatible servers from Trio. Knows the wire and nothing of the server.

::

    async with connect("http://127.0.0.1:8000") as client:
        async with client.chat("Hello", model="m") as stream:
            async for event in stream:
                print(event.text, end="")
"""

from __future__ import annotations

from triolet.client.chunks import Delta, TokenCounts
from triolet.client.classify import Ending, Instant, Outcome, StreamEvent
from triolet.client.client import Client, connect
from triolet.client.errors import (
    BrokenStreamError,
    Fault,
    RefusedError,
    StreamCutError,
    StreamFailedError,
    UnreachableError,
)
from triolet.client.stream import TextStream

__all__ = [
    "BrokenStreamError",
    "Client",
    "Delta",
    "Ending",
    "Fault",
    "Instant",
    "Outcome",
    "RefusedError",
    "StreamCutError",
    "StreamEvent",
    "StreamFailedError",
    "TextStream",
    "TokenCounts",
    "UnreachableError",
    "connect",
]
