"""``POST /v1/completions``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs

from triolet.runtime.tokenizing import TokenizerGate
from triolet.server.answer import completion_answer
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
from triolet.wire.codec import decode_request
from triolet.wire.completions import CompletionRequest

if TYPE_CHECKING:
    from starlette.types import Scope

    from triolet.runtime.lifecycle import Served

#: OpenAI's default for this endpoint; without one, a prompt would be continued to the end of
#: the model's context.
DEFAULT_MAX_TOKENS = 16


@attrs.frozen(eq=False)
class CompletionsEndpoint:
    """Reads text completion requests and answers in text completions."""

    gate: TokenizerGate
    max_timeout_s: float
    #: For requests that bring none; ``None`` draws a new one for each.
    default_seed: int | None

    async def prepare(self, body: bytes, scope: Scope, served: Served) -> Generation:
        """See :class:`triolet.server.exchange.Endpoint`."""
        request = decode_request(body, CompletionRequest)
        check_model(request.model, served)
        text = request.prompt if isinstance(request.prompt, str) else ""

        def tokenize_prompt() -> Prompt:
            prompt = tokenize(served, text, request.stop, add_special_tokens=True, param="prompt")
            if isinstance(request.prompt, str):
                return prompt
            return attrs.evolve(prompt, ids=request.prompt)

        prompt = await self.gate.run(
            tokenize_prompt, characters=len(text) + sum(map(len, request.stop))
        )
        request_id = f"cmpl-{scope['state']['request_id']}"
        return Generation(
            request=engine_request(
                request_id,
                prompt,
                request,
                served,
                limit=OutputLimit(request.token_limit, default=DEFAULT_MAX_TOKENS),
                default_seed=self.default_seed,
                prompt_param="prompt",
            ),
            text=text_options(request),
            answer=completion_answer(
                request_id, int(time.time()), request.model, request.stream_options
            ),
            stream=request.stream,
            timeout_s=timeout_s(request, scope, self.max_timeout_s),
            keepalive_s=keepalive_s(request),
        )
