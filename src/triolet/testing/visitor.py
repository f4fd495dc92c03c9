"""One client of a storm: it asks, reads as well or badly as it was told, and says what it saw."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import trio

from triolet.core import CancelCause
from triolet.testing.asgi import AsgiClient
from triolet.testing.lines import prompt_text
from triolet.testing.schedule import KEYS, Ask, Stage
from triolet.wire.sse import SseDecoder

if TYPE_CHECKING:
    from triolet.testing.asgi import AsgiExchange

#: By which a storm's server knows whose request it has.
NUMBER_HEADER = "x-storm-number"


@attrs.frozen
class Seen:
    """What a client saw of its request."""

    number: int
    #: 0 where no response began.
    status: int
    #: By choice.
    texts: Mapping[int, str]
    finishes: Mapping[int, str]
    #: Whether a choice said something after its end.
    disordered: bool
    #: The code of the error that it was told.
    error: str | None
    #: Whether ``[DONE]`` came, or the whole body of a success.
    done: bool
    #: Whether the response ended as HTTP says that it should.
    complete: bool
    #: Whether the client was there to the end; if not, whether the server hung up on it.
    stayed: bool
    hung_up: bool
    output_tokens: int | None
    began_s: float
    ended_s: float
    #: When its cancel was answered as done.
    cancelled_s: float | None


def body_of(ask: Ask, stage: Stage) -> dict[str, object]:
    """The JSON of a request."""
    body: dict[str, object] = {
        "model": "scripted",
        "stream": ask.stream,
        "n": ask.n,
        "max_tokens": ask.max_tokens,
    }
    if ask.chat:
        body["messages"] = [{"role": "user", "content": prompt_text(ask, 0)}]
        body |= {"logprobs": True, "top_logprobs": 2} if ask.logprobs else {}
    else:
        body["prompt"] = [prompt_text(ask, number) for number in range(len(ask.prompts))]
        body |= {"logprobs": 2} if ask.logprobs else {}
    if ask.stop is not None:
        body["stop"] = ask.stop
    if ask.stream and ask.include_usage:
        body["stream_options"] = {"include_usage": True}
    if ask.priority is not None and stage.scheduling_policy == "priority":
        body["priority"] = ask.priority
    if ask.timeout_s is not None:
        body["timeout"] = ask.timeout_s
    return body


def headers_of(ask: Ask, stage: Stage) -> dict[str, str]:
    """The headers of a request."""
    headers = {NUMBER_HEADER: str(ask.number)}
    if stage.keyed:
        headers["authorization"] = f"Bearer {KEYS[ask.key]}"
    return headers


@attrs.define(eq=False)
class Visitor:
    """Plays one :class:`~triolet.testing.schedule.Ask`."""

    ask: Ask
    stage: Stage
    client: AsgiClient
    #: The id by which the server knows the request, once it does.
    request_id: Callable[[], str | None]
    #: Has the server hang up on this client for a reason of its own.
    hang_up: Callable[[CancelCause], None]
    #: Whether it left, or the server hung up on it.
    left: bool = attrs.field(default=False, init=False)
    hung_up: bool = attrs.field(default=False, init=False)
    cancelled_s: float | None = attrs.field(default=None, init=False)
    #: Set when there is nothing more to read.
    _over: trio.Event = attrs.field(factory=trio.Event, init=False)
    _reading: _Reading = attrs.field(factory=lambda: _Reading(), init=False)  # noqa: PLW0108 - it stands below

    async def visit(self) -> Seen:
        """Ask and read until the response ends or the client leaves."""
        ask, began_s = self.ask, trio.current_time()
        body = json.dumps(body_of(ask, self.stage)).encode()
        exchange = self.client.start(
            "POST",
            "/v1/chat/completions" if ask.chat else "/v1/completions",
            body=body if ask.uploads else body[:-1],
            headers=headers_of(ask, self.stage),
            more_body=not ask.uploads,
        )
        async with trio.open_nursery() as nursery:
            if ask.leaves_after_s is not None:
                nursery.start_soon(self._leave_later, exchange, ask.leaves_after_s)
            if ask.cancels_after_s is not None:
                nursery.start_soon(self._cancel_later, ask.cancels_after_s)
            await self._read(exchange)
            self._over.set()
            ended_s = trio.current_time()
        return self._reading.seen(self, began_s, ended_s)

    async def _read(self, exchange: AsgiExchange) -> None:
        pauses = list(self.ask.pauses)
        leaves_at = self.ask.leaves_after_bytes
        while True:  # noqa: ASYNC913 - next_message() checkpoints or ends it
            try:
                message = await exchange.next_message()
            except trio.EndOfChannel:
                return  # noqa: ASYNC910 - as above
            except trio.ClosedResourceError:
                return  # noqa: ASYNC910 - it left while it waited
            self._reading.take(message)
            received = self._reading.received
            if leaves_at is not None and received >= leaves_at:
                self._leave(exchange)
                return  # noqa: ASYNC910 - it has waited for what it read
            pause_s = self.ask.read_s
            while pauses and received >= pauses[0].after_bytes:
                pause_s += pauses.pop(0).seconds
            if pause_s >= self.stage.send_timeout:
                await trio.sleep(self.stage.send_timeout)
                self.hang_up(CancelCause.SLOW_CLIENT)
                self.hung_up = True
                self._leave(exchange)
                return
            await trio.sleep(pause_s)

    def _leave(self, exchange: AsgiExchange) -> None:
        self.left = True
        exchange.disconnect()

    async def _leave_later(self, exchange: AsgiExchange, after_s: float) -> None:
        if not await self._ends_within(after_s):
            self._leave(exchange)

    async def _cancel_later(self, after_s: float) -> None:
        request_id = None if await self._ends_within(after_s) else self.request_id()
        if request_id is None:
            return
        response = await self.client.request(
            "POST",
            f"/v1/requests/{request_id}/cancel",
            headers=headers_of(self.ask, self.stage),
        )
        if response.status == 200:  # noqa: PLR2004 - success
            self.cancelled_s = trio.current_time()

    async def _ends_within(self, seconds: float) -> bool:
        """Wait so long, or until all has been read."""
        with trio.move_on_after(seconds):
            await self._over.wait()
        return self._over.is_set()


@attrs.define(eq=False)
class _Reading:
    """What has been read so far."""

    received: int = 0
    _status: int = 0
    _streams: bool = False
    _complete: bool = False
    _body: bytearray = attrs.field(factory=bytearray)
    _decoder: SseDecoder = attrs.field(factory=SseDecoder)
    _texts: dict[int, list[str]] = attrs.field(factory=lambda: defaultdict(list))
    _finishes: dict[int, str] = attrs.field(factory=dict)
    _disordered: bool = False
    _error: str | None = None
    _done: bool = False
    _output_tokens: int | None = None

    def take(self, message: Mapping[str, Any]) -> None:
        """Read one ASGI message."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._streams = any(
                name == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message["headers"]
            )
            return
        body: bytes = message.get("body", b"")
        self.received += len(body)
        self._complete = not message.get("more_body", False)
        if not self._streams:
            self._body += body
            return
        for event in self._decoder.feed(body):
            if event.data == "[DONE]":
                self._done = True
            else:
                self._take_json(json.loads(event.data))

    def _take_json(self, data: Mapping[str, Any]) -> None:
        if "error" in data:
            self._error = data["error"]["code"]
            return
        for choice in data.get("choices", ()):
            said = choice.get("delta") or choice.get("message") or choice
            index = choice["index"]
            self._disordered |= index in self._finishes
            self._texts[index].append(said.get("content") or said.get("text") or "")
            if choice.get("finish_reason") is not None:
                self._finishes[index] = choice["finish_reason"]
        if data.get("usage") is not None:
            self._output_tokens = data["usage"]["completion_tokens"]

    def seen(self, visitor: Visitor, began_s: float, ended_s: float) -> Seen:
        """Sum up."""
        if not self._streams and self._complete and self._body:
            self._take_json(json.loads(self._body))
            self._done = self._error is None
        return Seen(
            number=visitor.ask.number,
            status=self._status,
            texts={choice: "".join(parts) for choice, parts in sorted(self._texts.items())},
            finishes=dict(sorted(self._finishes.items())),
            disordered=self._disordered,
            error=self._error,
            done=self._done,
            complete=self._complete,
            stayed=not visitor.left,
            hung_up=visitor.hung_up,
            output_tokens=self._output_tokens,
            began_s=began_s,
            ended_s=ended_s,
            cancelled_s=visitor.cancelled_s,
        )
