"""``POST /v1/completions``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

import attrs

from triolet.errors import InvalidRequestError
from triolet.runtime.tokenizing import TokenizerGate
from triolet.server.answer import CompletionAnswer, CompletionVoice
from triolet.server.exchange import Generation
from triolet.server.sampling import EncodedWords, Policy, check_ids, check_policy
from triolet.server.translate import (
    OutputLimit,
    Prompt,
    check_model,
    continuous_usage,
    encode_words,
    engine_requests,
    include_usage,
    keepalive_s,
    text_options,
    timeout_s,
    tokenize,
    wanted,
    words_size,
)
from triolet.wire.codec import decode_request
from triolet.wire.completion_reply import CompletionBodies
from triolet.wire.completions import MAX_CHOICES, CompletionRequest

if TYPE_CHECKING:
    from starlette.types import Scope

    from triolet.runtime.served import Served

#: OpenAI's default for this endpoint; without one, a prompt would be continued to the end of
#: the model's context.
DEFAULT_MAX_TOKENS = 16


@attrs.frozen(eq=False)
class CompletionsEndpoint:
    """Reads text completion requests and answers in text completions."""

    gate: TokenizerGate
    policy: Policy
    id_prefix: ClassVar[str] = "cmpl-"

    async def prepare(self, body: bytes, scope: Scope, served: Served) -> Generation:
        """See :class:`triolet.server.exchange.Endpoint`."""
        request = decode_request(body, CompletionRequest)
        check_model(request.model, served)
        check_policy(request, self.policy)
        choices = len(request.prompt) * request.n
        if choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"`prompt` times `n` must be at most {MAX_CHOICES} choices, not {choices}.",
                param="n",
            )

        def read_prompts() -> tuple[tuple[Prompt, ...], EncodedWords]:
            prompts = _read(served, request)
            return prompts, encode_words(served.tokenizer, request)

        prompts, words = await self.gate.run(
            read_prompts,
            # Ids cost next to nothing, but for their text.
            characters=sum(len(p) for p in request.prompt if request.echo or isinstance(p, str))
            + words_size(request),
        )
        request_id = scope["state"]["request_id"]
        bodies = CompletionBodies(
            request_id, int(time.time()), request.model, include_usage=include_usage(request)
        )
        return Generation(
            requests=engine_requests(
                scope,
                prompts,
                request,
                served,
                words=words,
                limit=OutputLimit(request.token_limit, default=DEFAULT_MAX_TOKENS),
                policy=self.policy,
            ),
            text=text_options(request),
            answer=CompletionAnswer(
                CompletionVoice(bodies, wanted(request, prompts, served)),
                continuous_usage(request),
            ),
            stream=request.stream,
            timeout_s=timeout_s(request, scope, self.policy.max_timeout_s),
            keepalive_s=keepalive_s(request),
        )


def _read(served: Served, request: CompletionRequest) -> tuple[Prompt, ...]:
    """The prompts in ids and, with ``echo``, in text: as it came, or what the ids decode to."""
    special = request.add_special_tokens
    prompts: list[Prompt] = []
    for index, given in enumerate(request.prompt):
        param = "prompt" if len(request.prompt) == 1 else f"prompt[{index}]"
        if isinstance(given, str):
            prompt = tokenize(served, given, add_special_tokens=special, param=param)
            prompts.append(attrs.evolve(prompt, echo=given if request.echo else ""))
            continue
        check_ids(given, served.info.vocab_size, param)
        text = ""
        if request.echo:
            decode = served.tokenizer.decode
            text = decode(given, skip_special_tokens=request.skip_special_tokens)
        prompts.append(Prompt(given, param, text))
    return tuple(prompts)
