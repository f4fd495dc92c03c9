"""``POST /tokenize`` and ``POST /detokenize``: what the model's tokenizer makes of a text."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import attrs
import trio
from starlette.routing import Route

from triolet.errors import RequestTimeoutError
from triolet.runtime.arrival import ClientDisconnectedError
from triolet.runtime.lifecycle import Runtime
from triolet.runtime.tokenizing import TokenizerGate
from triolet.server.http import JsonResponse, read_body
from triolet.server.sampling import check_ids
from triolet.server.translate import check_model, messages_size, render
from triolet.wire.codec import decode_request
from triolet.wire.tokenize import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from triolet.runtime.lifecycle import Served

logger = logging.getLogger(__name__)

#: Requests whose body is read at the same time; each holds one body in memory.
MAX_READING = 16
#: Requests that are answered at the same time: a chat waits for one such text at most.
MAX_ANSWERING = 1
#: Seconds from the first byte to the answer: a body of the largest size takes two to tokenize.
TIMEOUT_S = 60.0

#: From a body and the model to the answer.
_Answer = Callable[[bytes, "Served"], Awaitable[Tokenized | Detokenized]]


@attrs.frozen
class _TokenizeApp:
    """An ASGI app around one of the two. Errors are answered by the application's handlers."""

    answer: _Answer
    runtime: Runtime
    reading: trio.CapacityLimiter
    answering: trio.CapacityLimiter
    max_body_bytes: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        answer: Tokenized | Detokenized | None = None
        try:
            with trio.move_on_after(TIMEOUT_S):
                async with self.reading:
                    served = self.runtime.served
                    body = await read_body(scope, receive, limit_bytes=self.max_body_bytes)
                    async with self.answering:
                        answer = await self.answer(body, served)
        except ClientDisconnectedError:
            logger.debug("a client left while it sent its request")
            return  # noqa: ASYNC910 - who left was waited for
        if answer is None:
            raise RequestTimeoutError("The deadline of this request passed.")
        await JsonResponse(answer)(scope, receive, send)


@attrs.frozen(eq=False)
class TokenizeRoutes:
    """The routes that ask the tokenizer alone."""

    gate: TokenizerGate
    runtime: Runtime
    max_body_bytes: int
    _reading: trio.CapacityLimiter = attrs.field(
        factory=lambda: trio.CapacityLimiter(MAX_READING), init=False
    )
    _answering: trio.CapacityLimiter = attrs.field(
        factory=lambda: trio.CapacityLimiter(MAX_ANSWERING), init=False
    )

    def routes(self) -> list[Route]:
        """All routes of this object."""
        return [
            Route(
                path,
                _TokenizeApp(
                    answer, self.runtime, self._reading, self._answering, self.max_body_bytes
                ),
                methods=["POST"],
            )
            for path, answer in (
                ("/tokenize", self.tokenize),
                ("/detokenize", self.detokenize),
            )
        ]

    async def tokenize(self, body: bytes, served: Served) -> Tokenized:
        """The ids of a text or of a chat.

        Raises:
            ClientError: The request is at fault.
        """
        request = decode_request(body, TokenizeRequest)
        if request.model is not None:
            check_model(request.model, served)
        tokenizer = served.tokenizer

        def encode() -> Tokenized:
            chat = request.prompt is None
            text = render(tokenizer, request) if chat else request.prompt
            special = request.add_special_tokens
            ids = tokenizer.encode(
                text or "", add_special_tokens=not chat if special is None else special
            )
            return {
                "count": len(ids),
                "max_model_len": served.info.max_model_len,
                "tokens": ids,
                "token_strs": (
                    [tokenizer.token_text(token_id) for token_id in ids]
                    if request.return_token_strs
                    else None
                ),
            }

        characters = len(request.prompt or "") + messages_size(request.messages or ())
        return await self.gate.run(encode, characters=characters)

    async def detokenize(self, body: bytes, served: Served) -> Detokenized:
        """The text of ids, special ones included.

        Raises:
            ClientError: The request is at fault.
        """
        request = decode_request(body, DetokenizeRequest)
        if request.model is not None:
            check_model(request.model, served)
        check_ids(request.tokens, served.info.vocab_size, "tokens")
        text = await self.gate.run(
            lambda: served.tokenizer.decode(request.tokens, skip_special_tokens=False),
            characters=len(request.tokens),
        )
        return {"prompt": text}
