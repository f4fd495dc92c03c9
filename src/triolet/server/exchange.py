"""One HTTP request that generates, from the first byte of its body to its last answer."""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import attrs
import trio
from starlette.types import Receive, Scope, Send

from triolet.core import CancelCause, EngineRequest, RequestId
from triolet.errors import OutputError, RequestTimeoutError, TrioletError
from triolet.output.events import Usage
from triolet.runtime.arrival import Arrival, ClientDisconnectedError
from triolet.runtime.lifecycle import Runtime
from triolet.runtime.request import RequestHandle
from triolet.runtime.served import TextOptions
from triolet.server.auth import TENANT_KEY
from triolet.server.deadline_stream import RECORD_KEY
from triolet.server.event_stream import (
    Answer,
    ChunkEncoder,
    error_event,
    write_body,
    write_event_stream,
)
from triolet.server.http import error_response, read_body
from triolet.server.translate import header_timeout_s, patience_s

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Message

    from triolet.runtime.served import Served

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: What the send of a complete response gets to finish once the server has said "disconnect".
#: On HTTP/1.1 it finishes at once; on HTTP/2 it may wait for a client that reads no more.
LAST_SEND_GRACE_S = 5.0
#: The shortest silence that a client's own read timeout makes us break: 26 bytes a second.
LEAST_KEEPALIVE_S = 0.5


@attrs.frozen
class Generation:
    """What an endpoint made of a request body: requests for the engine and the one answer."""

    #: One for each prompt, in their order.
    requests: tuple[EngineRequest, ...]
    text: TextOptions
    answer: Answer
    stream: bool
    timeout_s: float
    #: Seconds between keep-alives, 0 for none; ``None`` leaves it to the server.
    keepalive_s: float | None = None


class Endpoint(Protocol):
    """An OpenAI endpoint that generates: how it reads a body and how it answers."""

    @property
    def id_prefix(self) -> str:
        """What the ids of its requests begin with."""

    async def prepare(self, body: bytes, scope: Scope, served: Served) -> Generation:
        """Decode, validate, render and tokenize; the request's id is in the scope's state.

        Raises:
            ClientError: The request is at fault.
        """


@attrs.frozen
class ExchangeOptions:
    """The limits of one exchange. Seconds, bytes."""

    max_body_bytes: int
    commit_after_s: float
    #: 0 sends no keep-alives.
    keepalive_s: float


@attrs.frozen(eq=False)
class GenerationApp:
    """The ASGI app of one generating endpoint."""

    endpoint: Endpoint
    runtime: Runtime
    options: ExchangeOptions

    async def __call__(  # noqa: ASYNC910 - who left was waited for
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve one request."""
        try:
            await _Exchange(self, scope, receive, send).run()
        except ClientDisconnectedError:
            logger.debug("a client left while it sent its request")


@attrs.define(eq=False)
class _Exchange:
    app: GenerationApp
    scope: Scope
    receive: Receive
    send: Send
    handle: RequestHandle | None = None
    #: Whether the first and the last message of the response have been handed to the server.
    started: bool = False
    complete: bool = False
    #: Trio time from which on the client hears nothing until we say something.
    silent_since_s: float = math.inf

    async def run(self) -> None:
        """Answer, and watch for the client's leaving all the while.

        The watcher sits in ``receive`` from the last byte of the body on: nothing else tells
        that a client has left. It cancels the request itself, since the writer may be stuck in
        a send that no cancellation reaches, and then whatever of the writer can be cancelled.
        """
        runtime = self.app.runtime
        # One id from here on: in the record and the answer, whether it is refused or not.
        state = self.scope["state"]
        state["request_id"] = f"{self.app.endpoint.id_prefix}{state['request_id']}"
        try:
            with runtime.arrive(
                RequestId(state["request_id"]),
                state.get(TENANT_KEY, ""),
                timeout_s=header_timeout_s(self.scope),
            ) as arrival:
                body = await _in_time(arrival.deadline_s, self._read_body)
                self.silent_since_s = trio.current_time()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch, nursery.cancel_scope)
                    with suppress(ClientDisconnectedError):
                        await self._answer_or_refuse(arrival, body)
                    nursery.cancel_scope.cancel(reason="answered")
        except TrioletError as error:
            await self._send_error(error)

    async def _read_body(self) -> bytes:
        limit = self.app.options.max_body_bytes
        return await read_body(self.scope, self.receive, limit_bytes=limit)

    async def _watch(self, scope: trio.CancelScope) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        if self.handle is not None:
            # Our own listener says so where it was the one that hung up.
            record = self.scope.get("state", {}).get(RECORD_KEY)
            self.handle.cancel(getattr(record, "ended_by", None) or CancelCause.DISCONNECT)
        if self.complete:
            # Hypercorn says so too when a response is complete, in the middle of the send that
            # completed it. Cancelled there, it would neither close nor reuse the connection.
            scope.deadline = trio.current_time() + LAST_SEND_GRACE_S
        else:
            scope.cancel(reason="the client disconnected")

    async def _send(self, message: Message) -> None:
        self.started = True
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True
        try:
            await self.send(message)
        except OSError:
            # ASGI's word for a client that is not there any more.
            raise ClientDisconnectedError from None

    async def _answer_or_refuse(self, arrival: Arrival, body: bytes) -> None:
        try:
            await self._answer(arrival, body)
        except TrioletError as error:
            arrival.refuse(error)
            await self._send_error(error)

    async def _answer(self, arrival: Arrival, body: bytes) -> None:
        served = self.app.runtime.served
        prepare = partial(self.app.endpoint.prepare, body, self.scope, served)
        patience = patience_s(self.scope)
        gone_s = self.silent_since_s + patience
        generation = await _in_time(min(arrival.deadline_s, gone_s), prepare)
        timeout_s = generation.timeout_s
        if not generation.stream:
            # It hears nothing before all is said. Who streams is kept company.
            timeout_s = min(timeout_s, gone_s - arrival.arrived_s)
        self.handle = handle = arrival.admit(
            generation.requests, generation.text, timeout_s=timeout_s
        )
        try:
            error = await self._write(handle, generation, patience)
        except ClientDisconnectedError:
            raise
        except Exception:
            logger.exception("request %s: its answer could not be written", handle.id)
            error = OutputError("The server could not write the answer; this has been logged.")
            handle.fail(error)
        finally:
            # However the reader leaves: a request without a reader ends. No-op after an end.
            handle.cancel(CancelCause.DISCONNECT)
        if error is not None:
            await self._send_failure(error, generation)

    async def _write(
        self, handle: RequestHandle, generation: Generation, patience: float
    ) -> TrioletError | None:
        """Write the answer; the error of a request that failed before the first word of it."""
        if not generation.stream:
            return await write_body(handle, generation.answer, self.scope, self.receive, self._send)
        prompt_tokens = sum(len(request.prompt_ids) for request in generation.requests)
        waited_s = trio.current_time() - self.silent_since_s
        return await write_event_stream(
            handle,
            ChunkEncoder(generation.answer, Usage(prompt_tokens)),
            self._send,
            commit_after_s=min(self.app.options.commit_after_s, max(0, patience / 2 - waited_s)),
            keepalive_s=self._keepalive_s(generation, patience),
        )

    async def _send_failure(  # noqa: ASYNC910 - there may be nothing left to say it with
        self, error: TrioletError, generation: Generation
    ) -> None:
        """Say a failure where it still can be said. Without a last chunk nothing looks whole."""
        if not self.started:
            await self._send_error(error)
        elif generation.stream and not self.complete:
            event = error_event(error)
            await self._send({"type": "http.response.body", "body": event, "more_body": True})

    def _keepalive_s(self, generation: Generation, patience: float) -> float:
        asked = generation.keepalive_s
        seconds = self.app.options.keepalive_s if asked is None else asked
        # "Never" is the word of who knows the way to this client better than its SDK does.
        return min(seconds, max(patience / 2, LEAST_KEEPALIVE_S)) or math.inf

    async def _send_error(self, error: TrioletError) -> None:
        if error.code == CancelCause.SHUTDOWN:
            # Nothing was said yet, so the request can go to another server as it is.
            error = self.app.runtime.refusal()
        await error_response(error)(self.scope, self.receive, self._send)


async def _in_time(deadline_s: float, step: Callable[[], Awaitable[T]]) -> T:
    """The result of ``step``, unless the deadline passes before it is there."""
    with trio.move_on_at(deadline_s):
        return await step()
    raise RequestTimeoutError("The deadline of this request passed before it was read.")
