"""Triolet's side: from a step's ids to the bytes of its event streams."""

from __future__ import annotations

import sys
from functools import partial

import attrs
import shared

from triolet.core import FinishReason, RequestId, TokenLogprobs, TokenOutput, Vocabulary
from triolet.output.events import Usage
from triolet.output.logprobs import Spelling
from triolet.output.request import RequestOutput
from triolet.prompt.huggingface import load_tokenizer
from triolet.runtime.request import RequestHandle
from triolet.server.answer import ChatVoice, CompletionAnswer, ShownPrompt, Wanted
from triolet.server.event_stream import ChunkEncoder
from triolet.testing.engine import ScriptedBackend
from triolet.wire.chat_reply import ChatBodies

PROMPT = tuple(range(100, 110))


@attrs.define
class Requests:
    """The requests of one case, from the pump of the runtime on."""

    top: int | None
    handles: dict[RequestId, RequestHandle]
    encoders: list[ChunkEncoder]

    def outputs(self, token_id: int, *, last: bool) -> list[TokenOutput]:
        """See :class:`shared.Side`."""
        scores: tuple[TokenLogprobs, ...] = ()
        if self.top is not None:
            runners_up = tuple((other, -2.0) for other in shared.alternatives(token_id))
            scores = (TokenLogprobs(token_id, -0.5, 1, runners_up),)
        finish = FinishReason.LENGTH if last else None
        return [
            TokenOutput(request_id, (token_id,), finish, logprobs=scores)
            for request_id in self.handles
        ]

    def step(self, outputs: list[TokenOutput], sent: list[list[bytes]]) -> None:
        """See :class:`shared.Side`."""
        for output in outputs:
            self.handles[output.request_id].feed(output, 0)
        for handle, encoder, stream in zip(self.handles.values(), self.encoders, sent, strict=True):
            # Its public way waits in Trio for the bell; vLLM's queue is read without a wait too.
            batch = handle._hub.log.take()  # noqa: SLF001
            if batch:
                payload = encoder.encode([event for _, event in batch])
                if payload:
                    stream.append(payload)
                handle.delivered(batch[-1][0])


def open_requests(vocabulary: Vocabulary, case: shared.Case) -> Requests:
    """Begin the requests of a case."""
    wanted = Wanted(
        prompts=(ShownPrompt(PROMPT),), spelling=Spelling(vocabulary), logprobs=case.top
    )
    handles = {}
    encoders = []
    backend = ScriptedBackend()
    for number in range(case.requests):
        request_id = RequestId(f"chatcmpl-bench-{number}")
        handles[request_id] = RequestHandle(
            request_id,
            (request_id,),
            backend,
            RequestOutput(vocabulary, (len(PROMPT),), stops=case.stops),
            max_undelivered_bytes=2**18,
            on_end=lambda _handle, _record: None,
            received_ns=0,
        )
        bodies = ChatBodies(request_id, 0, "bench")
        encoders.append(
            ChunkEncoder(CompletionAnswer(ChatVoice(bodies, wanted)), Usage(len(PROMPT)))
        )
    return Requests(case.top, handles, encoders)


if __name__ == "__main__":
    shared.main(partial(open_requests, load_tokenizer(sys.argv[1]).vocabulary))
