"""Speak to an ASGI app without sockets, as slowly and rudely as a test needs.

Nothing here is particular to Triolet: any streaming ASGI app can be tested so on an autojump
clock. The app's ``send`` waits until the test reads, so a client that does not read is a test
that does not call :meth:`AsgiExchange.next_message`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import attrs
import trio
from starlette.types import ASGIApp, Message, Scope

from triolet.config import Config
from triolet.runtime.lifecycle import Phase, Runtime, Served, runtime_from
from triolet.server.app import create_app
from triolet.testing.engine import serve_script


@attrs.frozen
class AsgiResponse:
    """A response read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    #: Whether the app finished it; a stream cut by an error has ``False``.
    complete: bool

    def json(self) -> object:
        """The body as JSON."""
        return json.loads(self.body)


@attrs.define(eq=False)
class AsgiExchange:
    """One HTTP request in flight."""

    _messages: trio.MemoryReceiveChannel[Message]
    #: What the app has not received of the request's body.
    _parts: list[Message]
    _gone: bool = attrs.field(default=False, init=False)
    #: Set when there is something to receive.
    _news: trio.Event = attrs.field(factory=trio.Event, init=False)
    _status: int = attrs.field(default=0, init=False)
    _headers: dict[str, str] = attrs.field(factory=dict, init=False)

    def disconnect(self) -> None:
        """Leave: from now on the app's ``receive`` says so and its ``send`` goes nowhere."""
        self._gone = True
        self._news.set()
        self._messages.close()

    def upload(self, body: bytes, *, more_body: bool = False) -> None:
        """Send a further part of the body of a request that was started with ``more_body``."""
        self._parts.append({"type": "http.request", "body": body, "more_body": more_body})
        self._news.set()

    async def next_message(self) -> Message:
        """The next message that the app sends.

        Raises:
            trio.EndOfChannel: The app has returned.
        """
        message = await self._messages.receive()
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
        return message

    async def next_body(self) -> bytes:
        """The next piece of the body, skipping the start of the response."""
        message = await self.next_message()
        while message["type"] != "http.response.body":
            message = await self.next_message()
        body: bytes = message["body"]
        return body

    async def read(self) -> AsgiResponse:
        """Read what has not been read yet, to the end."""
        body, complete = b"", False
        while True:  # noqa: ASYNC913 - next_message() checkpoints or ends it
            try:
                message = await self.next_message()
            except trio.EndOfChannel:
                return AsgiResponse(self._status, self._headers, body, complete)  # noqa: ASYNC910
            if message["type"] == "http.response.body":
                body += message.get("body", b"")
                complete = not message.get("more_body", False)

    async def _receive(self) -> Message:
        """What the app's ``receive`` says: the parts of the body in order, then that we left."""
        await trio.lowlevel.checkpoint()
        while not self._parts:
            if self._gone:
                return {"type": "http.disconnect"}
            if self._news.is_set():
                self._news = trio.Event()
            await self._news.wait()
        return self._parts.pop(0)


@attrs.frozen(eq=False)
class AsgiClient:
    """Starts requests to an app in a nursery of the caller's."""

    app: ASGIApp
    nursery: trio.Nursery

    def start(
        self,
        method: str,
        path: str,
        *,
        json_body: object = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        more_body: bool = False,
    ) -> AsgiExchange:
        """Send a request; the app begins to work on it at once.

        With ``more_body`` the rest of the body comes by :meth:`AsgiExchange.upload`, or never.
        """
        if body is None:
            body = b"" if json_body is None else json.dumps(json_body).encode()
        # No slack: what the app has sent and the test has not read does not exist.
        send, receive = trio.open_memory_channel[Message](0)
        exchange = AsgiExchange(receive, [])
        exchange.upload(body, more_body=more_body)
        scope = _scope(method, path, {"content-type": "application/json", **(headers or {})})
        self.nursery.start_soon(self._run, scope, send, exchange)
        return exchange

    async def request(
        self,
        method: str,
        path: str,
        *,
        json_body: object = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsgiResponse:
        """Send a request and read the response to its end; leave where that is cut short."""
        exchange = self.start(method, path, json_body=json_body, body=body, headers=headers)
        try:
            return await exchange.read()
        finally:
            exchange.disconnect()

    async def _run(
        self,
        scope: Scope,
        channel: trio.MemorySendChannel[Message],
        exchange: AsgiExchange,
    ) -> None:
        async def receive() -> Message:
            return await exchange._receive()  # noqa: SLF001 - the two are one thing

        async def send(message: Message) -> None:
            try:
                await channel.send(message)
            except trio.BrokenResourceError:
                await trio.lowlevel.checkpoint()  # as on a real server, it goes nowhere

        with channel:
            await self.app(scope, receive, send)


@attrs.frozen(eq=False)
class AsgiServer:
    """A running server without sockets."""

    runtime: Runtime
    client: AsgiClient


@asynccontextmanager
async def open_server(
    served: Served | None = None, config: Config | None = None
) -> AsyncIterator[AsgiServer]:
    """A server that is ready to be asked, on a scripted engine unless told otherwise.

    Leaving drains it without mercy and waits until it has stopped.
    """
    served = served or serve_script()
    config = config or Config()

    async def load() -> Served:
        await trio.lowlevel.checkpoint()
        return served

    runtime = runtime_from(load, config)
    app = create_app(runtime, config)
    async with trio.open_nursery() as nursery:
        await nursery.start(runtime.run)
        await runtime.wait_started()
        yield AsgiServer(runtime, AsgiClient(app, nursery))
        while runtime.phase is not Phase.STOPPED:
            runtime.drain()
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel(reason="the test is over")


def _scope(method: str, path: str, headers: Mapping[str, str]) -> Scope:
    path, _, query = path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
