"""vLLM's side: its own output processor and its own chunks, fed with the same ids.

Where its server would do more, it does not here: its engine's outputs arrive unpacked, no event
loop wakes anybody, and a delta without text and logprobs is not sent.
"""

from __future__ import annotations

import gc
import sys
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import shared
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import TokenizerLike, get_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

PROMPT = list(range(100, 110))


class Words(OpenAIServingChat):
    """Its endpoint without its engine: only how it writes logprobs is called."""

    def __init__(self) -> None:
        self.return_tokens_as_token_ids = False


class Requests:
    """The requests of one case."""

    def __init__(self, tokenizer: TokenizerLike, case: shared.Case) -> None:
        self.tokenizer = tokenizer
        self.top = case.top
        self.words = Words()
        self.processor = OutputProcessor(tokenizer, log_stats=False)
        self.ids = [f"chatcmpl-bench-{number}" for number in range(case.requests)]
        self.queues = []
        for request_id in self.ids:
            params = SamplingParams(
                stop=list(case.stops),
                logprobs=case.top,
                max_tokens=10**6,
                output_kind=RequestOutputKind.DELTA,
            )
            queue = RequestOutputCollector(RequestOutputKind.DELTA, request_id)
            request = EngineCoreRequest(
                request_id, PROMPT, None, params, None, 0.0, None, None, None,
                external_req_id=request_id,
            )  # fmt: skip
            self.processor.add_request(request, None, queue=queue)
            self.queues.append(queue)

    def outputs(self, token_id: int, *, last: bool) -> list[EngineCoreOutput]:
        """See :class:`shared.Side`."""
        finish = FinishReason.LENGTH if last else None
        return [
            EngineCoreOutput(
                request_id,
                [token_id],
                new_logprobs=None if self.top is None else scores(token_id, self.top),
                finish_reason=finish,
            )
            for request_id in self.ids
        ]

    def step(self, outputs: list[EngineCoreOutput], sent: list[list[bytes]]) -> None:
        """See :class:`shared.Side`."""
        self.processor.process_outputs(outputs)
        for queue, stream in zip(self.queues, sent, strict=True):
            made = queue.get_nowait()
            if made is None:
                continue
            choice = made.outputs[0]
            if choice.text or choice.finish_reason or self.top is not None:
                stream.append(self.chunk(made))

    def chunk(self, made: RequestOutput) -> bytes:
        """One event, put together as its ``chat_completion_stream_generator`` does."""
        output = made.outputs[0]
        logprobs = None
        if self.top is not None:
            logprobs = self.words._create_chat_logprobs(  # noqa: SLF001 - what its endpoint calls
                token_ids=output.token_ids,
                top_logprobs=output.logprobs,
                tokenizer=self.tokenizer,
                num_output_top_logprobs=self.top,
                return_as_token_id=None,
            )
        response = ChatCompletionStreamResponse(
            id=made.request_id,
            object="chat.completion.chunk",
            created=0,
            choices=[
                ChatCompletionResponseStreamChoice(
                    index=output.index,
                    delta=DeltaMessage(content=output.text),
                    logprobs=logprobs,
                    finish_reason=output.finish_reason,
                    token_ids=None,
                )
            ],
            model="bench",
        )
        return f"data: {response.model_dump_json(exclude_unset=True)}\n\n".encode()


def scores(token_id: int, top: int) -> LogprobsLists:
    """The chosen token, then the most likely ones."""
    return LogprobsLists(
        np.array([[token_id, *shared.alternatives(token_id)]]),
        np.array([[-0.5] + [-2.0] * top], dtype=np.float32),
        np.array([1]),
    )


if __name__ == "__main__":
    loaded = get_tokenizer(sys.argv[1])
    # As its server does before it serves.
    gc.collect()
    gc.freeze()
    shared.main(partial(Requests, loaded))
