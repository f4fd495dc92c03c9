"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

import attrs

from triolet.runtime.tokenizing import TokenizerGate
from triolet.server.answer import ChatVoice, CompletionAnswer
from triolet.server.exchange import Generation
from triolet.server.sampling import EncodedWords, Policy, check_policy
from triolet.server.translate import (
    OutputLimit,
    Prompt,
    check_model,
    continuous_usage,
    encode_words,
    engine_requests,
    include_usage,
    keepalive_s,
    messages_size,
    render,
    text_options,
    timeout_s,
    tokenize,
    wanted,
    words_size,
)
from triolet.wire.chat import ChatRequest
from triolet.wire.chat_reply import ChatBodies
from triolet.wire.codec import decode_request

if TYPE_CHECKING:
    from starlette.types import Scope

    from triolet.runtime.served import Served


@attrs.frozen(eq=False)
class ChatEndpoint:
    """Reads chat requests and answers in chat completions."""

    gate: TokenizerGate
    policy: Policy
    id_prefix: ClassVar[str] = "chatcmpl-"

    async def prepare(self, body: bytes, scope: Scope, served: Served) -> Generation:
        """See :class:`triolet.server.exchange.Endpoint`."""
        request = decode_request(body, ChatRequest)
        check_model(request.model, served)
        check_policy(request, self.policy)
        tokenizer = served.tokenizer

        def render_and_tokenize() -> tuple[Prompt, EncodedWords]:
            text = render(tokenizer, request)
            special = request.add_special_tokens
            prompt = tokenize(served, text, add_special_tokens=special, param="messages")
            return prompt, encode_words(tokenizer, request)

        prompt, words = await self.gate.run(
            render_and_tokenize,
            characters=messages_size(request.messages) + words_size(request),
        )
        request_id = scope["state"]["request_id"]
        # OpenAI's newer name of the same field; where both are sent, they agree.
        newer = request.max_completion_tokens is not None
        limit = OutputLimit(request.token_limit, "max_completion_tokens" if newer else "max_tokens")
        bodies = ChatBodies(
            request_id, int(time.time()), request.model, include_usage=include_usage(request)
        )
        return Generation(
            requests=engine_requests(
                scope,
                (prompt,),
                request,
                served,
                words=words,
                limit=limit,
                policy=self.policy,
            ),
            text=text_options(request),
            answer=CompletionAnswer(
                ChatVoice(bodies, wanted(request, (prompt,), served)), continuous_usage(request)
            ),
            stream=request.stream,
            timeout_s=timeout_s(request, scope, self.policy.max_timeout_s),
            keepalive_s=keepalive_s(request),
        )
