"""A request's events on a response: as Server-Sent Events, or folded into one body.

Both read the same log through the same door, so what is said cannot differ. Writing to the
socket is the only thing here that can be stuck, and nothing of the engine hangs on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs
import trio

from triolet.core import TokenLogprobs
from triolet.output.events import (
    ChoiceFinished,
    Completed,
    Failed,
    PromptScored,
    TextDelta,
    Usage,
)
from triolet.server.http import JsonResponse
from triolet.wire.codec import encode
from triolet.wire.common import error_body
from triolet.wire.sse import DONE, KEEPALIVE, encode_data

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from starlette.types import Receive, Scope, Send

    from triolet.errors import TrioletError
    from triolet.output.events import OutputEvent
    from triolet.runtime.request import RequestHandle

#: Scored tokens of a whole response that are written in a few milliseconds of the event loop;
#: more are written in a thread, which lets others in between.
SCORES_INLINE = 256
#: What every proxy on the way needs to hear, or it holds tokens back.
EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Protocol):
    """One endpoint's way of saying what a request says. Lives as long as the request."""

    @property
    def id(self) -> str:
        """The id in the body and in ``X-Request-Id``."""

    def scored(self, event: PromptScored) -> None:
        """Take what is known of a prompt's tokens; its choices speak later."""

    def chunks(
        self, delta: TextDelta, finish: ChoiceFinished | None, usage: Usage
    ) -> Iterable[Mapping[str, object]]:
        """The chunk with new text, or the end of a choice, or both; ``usage`` is up to here.

        None where there is nothing that the client wants to know; more than one where something
        has to be said before it.
        """

    def last_chunk(self, usage: Usage) -> Mapping[str, object] | None:
        """The usage chunk after all choices have finished, if the client asked for one."""

    def body(self, choices: Mapping[int, FoldedChoice], usage: Usage) -> Mapping[str, object]:
        """The whole response at once."""


@attrs.define
class FoldedChoice:
    """All deltas of one choice in one piece."""

    parts: list[str] = attrs.field(factory=list)
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[TokenLogprobs] = attrs.field(factory=list)
    finish: ChoiceFinished | None = None

    def delta(self, index: int) -> TextDelta:
        """The one delta that says all of them."""
        return TextDelta(index, "".join(self.parts), tuple(self.token_ids), tuple(self.logprobs))


def fold(event: OutputEvent, choices: dict[int, FoldedChoice], answer: Answer) -> None:
    """Add an event to what the choices have said so far."""
    match event:
        case TextDelta():
            choice = choices.setdefault(event.choice, FoldedChoice())
            choice.parts.append(event.text)
            choice.token_ids += event.token_ids
            choice.logprobs += event.logprobs
        case PromptScored():
            answer.scored(event)
        case ChoiceFinished():
            choices.setdefault(event.choice, FoldedChoice()).finish = event
        case Completed() | Failed():
            pass


@attrs.define
class ChunkEncoder:
    """Turns batches of events into bytes of an event stream."""

    answer: Answer
    usage: Usage
    #: Prompt tokens that needed no computing; whoever learns it sets it.
    cached_tokens: int = attrs.field(default=0, init=False)
    #: Whether nothing has been said yet but, at most, an error.
    silent: bool = attrs.field(default=True, init=False)

    def encode(self, events: list[OutputEvent]) -> bytes:
        """Bytes of all events. The last text of a choice travels with its finish."""
        return b"".join(self._frames(events))

    def _frames(self, events: list[OutputEvent]) -> Iterator[bytes]:
        #: By choice, what waits to see whether its finish is in this batch too.
        held: dict[int, TextDelta] = {}
        for event in events:
            match event:
                case TextDelta():
                    if event.choice in held:
                        yield from self._chunks(held.pop(event.choice), None)
                    held[event.choice] = event
                case ChoiceFinished():
                    last = held.pop(event.choice, TextDelta(event.choice, ""))
                    yield from self._chunks(last, event)
                case PromptScored():
                    self.answer.scored(event)
                case Completed() | Failed():
                    yield from self._release(held)
                    yield from self._end(event)
        yield from self._release(held)

    def _release(self, held: dict[int, TextDelta]) -> Iterator[bytes]:
        for delta in held.values():
            yield from self._chunks(delta, None)
        held.clear()

    def _end(self, event: Completed | Failed) -> Iterator[bytes]:
        if isinstance(event, Failed):
            yield error_event(event.error)
            return
        usage = self.answer.last_chunk(event.usage)
        if usage is not None:
            yield encode_data(encode(usage))
        yield DONE

    def _chunks(self, delta: TextDelta, finish: ChoiceFinished | None) -> Iterator[bytes]:
        before = self.usage
        # Once per token, where attrs.evolve would take longer than writing the chunk.
        self.usage = Usage(
            before.prompt_tokens,
            before.output_tokens + len(delta.token_ids),
            self.cached_tokens,
            before.reasoning_tokens,
        )
        for chunk in self.answer.chunks(delta, finish, self.usage):
            self.silent = False
            yield encode_data(encode(chunk))


def error_event(error: TrioletError) -> bytes:
    """The last event of a stream that does not end well."""
    return encode_data(encode(error_body(error)))


async def write_event_stream(
    handle: RequestHandle,
    encoder: ChunkEncoder,
    send: Send,
    *,
    commit_after_s: float,
    keepalive_s: float,
) -> TrioletError | None:
    """Write a request as Server-Sent Events until its terminal event has been accepted.

    Headers wait for the first event, or ``commit_after_s``: what fails before them still gets
    an HTTP status. From then on ``keepalive_s`` of silence sends a comment. An error after the
    headers ends the response without its last chunk, so that no client takes it for success.

    Returns:
        The error of a request that failed before the headers were sent. It is not raised: an error
        that is kept, by the log it was taken from, must not get a traceback to keep.
    """
    headers_sent = False
    deadline = trio.current_time() + commit_after_s
    while True:
        batch: list[tuple[int, OutputEvent]] = []
        with trio.move_on_at(deadline):
            batch = await handle.take()
        events = [event for _, event in batch]
        terminal = events[-1] if events else None
        encoder.cached_tokens = handle.cached_tokens
        payload = encoder.encode(events) if batch or not headers_sent else KEEPALIVE
        if isinstance(terminal, Failed) and not headers_sent and encoder.silent:
            return terminal.error
        if not headers_sent and (payload or not batch):
            await send(_start(encoder.answer.id))
            headers_sent = True
        if payload:
            more = not isinstance(terminal, Completed)
            await send({"type": "http.response.body", "body": payload, "more_body": more})
            deadline = trio.current_time() + keepalive_s
        elif not batch:
            deadline = trio.current_time() + keepalive_s
        if batch:
            handle.delivered(batch[-1][0])
        if isinstance(terminal, Completed | Failed):
            return None


def _start(request_id: str) -> dict[str, object]:
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [*EVENT_STREAM_HEADERS, (b"x-request-id", request_id.encode("ascii"))],
    }


async def write_body(
    handle: RequestHandle, answer: Answer, scope: Scope, receive: Receive, send: Send
) -> TrioletError | None:
    """Read a request to its end and write it as one JSON body.

    Returns:
        The error of a request that failed; nothing was sent. As in :func:`write_event_stream`.
    """
    choices: dict[int, FoldedChoice] = {}
    usage: Usage | None = None
    while usage is None:
        batch = await handle.take()
        for _, event in batch:
            fold(event, choices, answer)
        handle.delivered(batch[-1][0])
        terminal = batch[-1][1]
        if isinstance(terminal, Failed):
            return terminal.error
        if isinstance(terminal, Completed):
            usage = terminal.usage
    totals = usage

    def write() -> JsonResponse:
        return JsonResponse(answer.body(choices, totals), headers={"X-Request-Id": answer.id})

    scored = sum(len(choice.logprobs) for choice in choices.values())
    response = write() if scored < SCORES_INLINE else await trio.to_thread.run_sync(write)
    await response(scope, receive, send)
    return None
