"""A client of any OpenAI-compatible server, on Trio.

Each answer is a scope: it is read inside of its ``async with`` block, and leaving the block, by
whatever way, closes its connection. There are no timeouts but that of connecting: callers set
deadlines, as everywhere on Trio. Nothing is retried here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import Final

import attrs
import httpx2
import trio

from triolet import __version__
from triolet.client.classify import Ending
from triolet.client.errors import RefusedError, UnreachableError, read_json, read_refusal
from triolet.client.stream import TextStream, instant
from triolet.wire.codec import encode

#: Seconds to a connection. The system's own limit is minutes.
CONNECT_TIMEOUT_S = 10.0
#: Closing a socket does not wait; a transport of somebody else's may.
CLOSE_TIMEOUT_S = 5.0
#: Of an error body.
MAX_REFUSAL_BYTES = 64 * 1024
#: Of a list of models.
MAX_ANSWER_BYTES = 16 * 1024 * 1024

_NO_FIELDS: Mapping[str, object] = {}
#: What a server sends that overlooked ``stream``, or a proxy in its place.
_NO_STREAM: Final = ("application/json", "text/html")


@attrs.frozen(eq=False)
class Client:
    """Talks to one server; made by :func:`connect`."""

    base_url: str
    _http: httpx2.AsyncClient = attrs.field(repr=False)

    def chat(
        self,
        messages: Sequence[Mapping[str, object]] | str,
        *,
        model: str,
        stream_options: Mapping[str, object] = _NO_FIELDS,
        headers: Mapping[str, str] | None = None,
        **fields: object,
    ) -> AbstractAsyncContextManager[TextStream]:
        """Stream a chat completion.

        Args:
            messages: As OpenAI has them; a string is one message of the user.
            model: A name from :meth:`models`.
            stream_options: Over ``{"include_usage": true}``.
            headers: Of this request only.
            fields: Further fields of the body, such as ``max_tokens``.

        Raises:
            UnreachableError: From entering: nobody answered.
            RefusedError: From entering: an answer came and it is no stream.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = _body(model, stream_options, {"messages": list(messages), **fields})
        return self.stream("/chat/completions", body, headers=headers)

    def completion(
        self,
        prompt: str | Sequence[int],
        *,
        model: str,
        stream_options: Mapping[str, object] = _NO_FIELDS,
        headers: Mapping[str, str] | None = None,
        **fields: object,
    ) -> AbstractAsyncContextManager[TextStream]:
        """Stream a text completion of a text or of token ids; otherwise as :meth:`chat`."""
        given = prompt if isinstance(prompt, str) else list(prompt)
        body = _body(model, stream_options, {"prompt": given, **fields})
        return self.stream("/completions", body, headers=headers)

    @asynccontextmanager
    async def stream(
        self, path: str, body: Mapping[str, object], *, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[TextStream]:
        """Post a body to a path below ``/v1`` and read the answer as an event stream.

        Raises:
            UnreachableError: Nobody answered.
            RefusedError: An answer came and it is no stream.
        """
        started = instant()
        request = self._http.build_request(
            "POST",
            self.base_url + path,
            content=encode(body),
            headers={
                "Content-Type": "application/json",
                "Accept": "text/event-stream",
                **(headers or {}),
            },
        )
        async with self._answer(request) as response:
            answered = instant()
            if response.status_code != httpx2.codes.OK or _no_stream(response):
                raise await _refusal(response)
            pieces = response.aiter_bytes()
            try:
                stream = TextStream(started, answered, response.headers, pieces)
                yield stream
                if stream.outcome is not None and stream.outcome.ending is Ending.DONE:
                    await stream.settle()
            finally:
                with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                    await _close(response, pieces)

    async def models(self) -> tuple[str, ...]:
        """Names of the models that the server lists.

        Raises:
            UnreachableError: Nobody answered.
            RefusedError: The answer is no list of models.
        """
        async with self._answer(
            self._http.build_request("GET", f"{self.base_url}/models")
        ) as response:
            if response.status_code != httpx2.codes.OK:
                raise await _refusal(response)
            body = await _read_some(response, MAX_ANSWER_BYTES)
        try:
            listed = read_json(body)
        except ValueError:
            listed = None
        models = listed.get("data") if isinstance(listed, Mapping) else None
        if not isinstance(models, list):
            raise read_refusal(response.status_code, response.headers, body)
        return tuple(m["id"] for m in models if isinstance(m, dict) and type(m.get("id")) is str)

    @asynccontextmanager
    async def _answer(self, request: httpx2.Request) -> AsyncIterator[httpx2.Response]:
        with _unreachable(self.base_url):
            response = await self._http.send(request, stream=True)
        try:
            yield response
        finally:
            with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await response.aclose()


@asynccontextmanager
async def connect(
    url: str,
    *,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    max_connections: int | None = None,
    transport: httpx2.AsyncBaseTransport | None = None,
) -> AsyncIterator[Client]:
    """A client for the length of a block; connections are made as they are needed.

    Args:
        url: Of the server, with or without the ``/v1`` at its end.
        api_key: Sent as ``Authorization: Bearer``.
        headers: Sent with every request.
        connect_timeout_s: Seconds to a connection.
        max_connections: At once; further requests wait for one. ``None`` is no limit.
        transport: Carries requests in place of sockets.

    Raises:
        ValueError: The URL is no HTTP URL.
    """
    sent = {"User-Agent": f"triolet/{__version__}", "Accept-Encoding": "identity"}
    if api_key:
        sent["Authorization"] = f"Bearer {api_key}"
    async with httpx2.AsyncClient(
        headers={**sent, **(headers or {})},
        timeout=httpx2.Timeout(None, connect=connect_timeout_s),
        limits=httpx2.Limits(
            max_connections=max_connections, max_keepalive_connections=max_connections
        ),
        transport=transport,
    ) as http:
        yield Client(api_root(url), http)


def api_root(url: str) -> str:
    """The URL that ends in ``/v1``, whether it was written so or not.

    Raises:
        ValueError: It is no HTTP URL.
    """
    root = url.strip().rstrip("/")
    try:
        parsed = httpx2.URL(root)
    except httpx2.InvalidURL as error:
        raise ValueError(f"{url!r} is no URL: {error}.") from None
    if parsed.scheme not in {"http", "https"} or not parsed.host or parsed.query:
        raise ValueError(f"{url!r} is no URL of a server: write http://HOST:PORT.")
    return root if root.endswith("/v1") else f"{root}/v1"


def _body(
    model: str, stream_options: Mapping[str, object], fields: Mapping[str, object]
) -> dict[str, object]:
    options = {"include_usage": True, **stream_options}
    return {"model": model, **fields, "stream": True, "stream_options": options}


def _no_stream(response: httpx2.Response) -> bool:
    return response.headers.get("content-type", "").lower().startswith(_NO_STREAM)


async def _close(response: httpx2.Response, pieces: AsyncIterator[bytes]) -> None:
    """Close an answer that may be in the middle of its body.

    The library's generators do not close each other, and one that is dropped where it stands is
    a ResourceWarning of Trio's. So they get to see that the connection is closed: what they
    still hold, at most one read, and then an error that ends them all.
    """
    await response.aclose()
    with suppress(httpx2.HTTPError):
        async for _ in pieces:
            pass


async def _refusal(response: httpx2.Response) -> RefusedError:
    body = await _read_some(response, MAX_REFUSAL_BYTES)
    return read_refusal(response.status_code, response.headers, body)


async def _read_some(response: httpx2.Response, limit: int) -> bytes:
    """At most ``limit`` bytes of a body, or what came of it before it was cut."""
    body = bytearray()
    pieces = response.aiter_bytes()
    with suppress(httpx2.HTTPError):  # a part says more than that it was cut
        async for piece in pieces:
            body += piece
            if len(body) >= limit:
                await _close(response, pieces)
    return bytes(body[:limit])  # noqa: ASYNC910 - the body was read, or is empty


@contextmanager
def _unreachable(base_url: str) -> Iterator[None]:
    try:
        yield
    except httpx2.HTTPError as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise UnreachableError(f"No answer from {base_url}: {reason}.") from error
