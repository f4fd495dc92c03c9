"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs

from triolet.errors import InvalidRequestError
from triolet.runtime.tokenizing import TokenizerGate
from triolet.server.answer import chat_answer
from triolet.server.exchange import Generation
from triolet.server.translate import (
    OutputLimit,
    Prompt,
    check_model,
    engine_request,
    keepalive_s,
    text_options,
    timeout_s,
    tokenize,
)
from triolet.wire.chat import ChatRequest
from triolet.wire.codec import decode_request

if TYPE_CHECKING:
    from starlette.types import Scope

    from triolet.runtime.lifecycle import Served


#: What rendering a message costs, in characters of text that take as long to tokenize.
CHARACTERS_PER_MESSAGE = 64


@attrs.frozen(eq=False)
class ChatEndpoint:
    """Reads chat requests and answers in chat completions."""

    gate: TokenizerGate
    max_timeout_s: float
    #: For requests that bring none; ``None`` draws a new one for each.
    default_seed: int | None

    async def prepare(self, body: bytes, scope: Scope, served: Served) -> Generation:
        """See :class:`triolet.server.exchange.Endpoint`."""
        request = decode_request(body, ChatRequest)
        check_model(request.model, served)
        tokenizer = served.tokenizer
        if not tokenizer.has_chat_template:
            raise InvalidRequestError(
                "This model has no chat template; use /v1/completions.", param="messages"
            )

        def render_and_tokenize() -> Prompt:
            text = tokenizer.render_chat(request.template_messages())
            return tokenize(served, text, request.stop, add_special_tokens=False, param="messages")

        prompt = await self.gate.run(
            render_and_tokenize,
            characters=sum(
                len(message.content) + CHARACTERS_PER_MESSAGE for message in request.messages
            )
            + sum(map(len, request.stop)),
        )
        request_id = f"chatcmpl-{scope['state']['request_id']}"
        # OpenAI's newer name of the same field; where both are sent, they agree.
        newer = request.max_completion_tokens is not None
        limit = OutputLimit(request.token_limit, "max_completion_tokens" if newer else "max_tokens")
        return Generation(
            request=engine_request(
                request_id,
                prompt,
                request,
                served,
                limit=limit,
                default_seed=self.default_seed,
                prompt_param="messages",
            ),
            text=text_options(request),
            answer=chat_answer(request_id, int(time.time()), request.model, request.stream_options),
            stream=request.stream,
            timeout_s=timeout_s(request, scope, self.max_timeout_s),
            keepalive_s=keepalive_s(request),
        )
