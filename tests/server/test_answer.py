"""Contract §2: the response of record. Streamed or whole, it is the fold of the same events."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.reading import events

from triolet.core import FinishReason, RequestId, TokenOutput, Vocabulary
from triolet.output.events import Completed, Usage
from triolet.output.logprobs import Spelling
from triolet.output.request import RequestOutput
from triolet.prompt.bytelevel import BYTE_EOS_ID, ByteTokenizer
from triolet.server.answer import (
    ChatVoice,
    CompletionAnswer,
    CompletionVoice,
    ShownPrompt,
    Wanted,
)
from triolet.server.event_stream import ChunkEncoder, fold
from triolet.testing.engine import score
from triolet.wire.chat_reply import ChatBodies
from triolet.wire.codec import encode
from triolet.wire.completion_reply import CompletionBodies

VOCABULARY: Vocabulary = ByteTokenizer().vocabulary
PROMPTS = ((256, *b"hi"), tuple("é".encode()))
ENDPOINTS = {"chat": (ChatVoice, ChatBodies), "text": (CompletionVoice, CompletionBodies)}

#: Whole characters, bytes of some, special tokens.
PIECES = st.one_of(
    st.sampled_from(["a", "end", "é", "👋", "\u2028"]).map(lambda text: (*text.encode(),)),
    st.sampled_from([(0xC3,), (0xF0, 0x9F), (258,), (261,)]),
)
IDS = st.lists(PIECES, max_size=6).map(lambda pieces: tuple(i for piece in pieces for i in piece))


@attrs.frozen
class Recording:
    """What the engine said of each choice, and what the client asked for."""

    #: Per prompt, per choice.
    ids: tuple[tuple[tuple[int, ...], ...], ...]
    stops: tuple[str, ...]
    logprobs: int | None
    prompt_logprobs: int | None
    token_ids: bool
    echo: bool
    usage: bool

    @property
    def n(self):
        return len(self.ids[0])

    def wanted(self, *, echo):
        texts = [bytes(i for i in ids if i < 256).decode() if echo else "" for ids in PROMPTS]
        return Wanted(
            prompts=tuple(map(ShownPrompt, PROMPTS, texts))[: len(self.ids)],
            spelling=Spelling(VOCABULARY),
            n=self.n,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            token_ids=self.token_ids,
            echo=echo,
        )


@st.composite
def recordings(draw, *, prompts):
    n = draw(st.integers(1, 3))
    ids = st.lists(IDS, min_size=n, max_size=n).map(tuple)
    return Recording(
        ids=tuple(draw(ids) for _ in range(prompts)),
        stops=draw(st.sampled_from([(), ("end",), ("d", "👋")])),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, 1])),
        token_ids=draw(st.booleans()),
        echo=draw(st.booleans()),
        usage=draw(st.booleans()),
    )


def outputs(recording, prompt, choice, sizes):
    """The engine's outputs of one choice, cut into pieces of these sizes, over and over."""
    ids = (*recording.ids[prompt][choice], BYTE_EOS_ID)
    place, sizes = 0, sizes or [1]
    while place < len(ids):
        size = sizes[place % len(sizes)]
        part = range(place, min(place + size, len(ids)))
        place = part.stop
        scores = tuple(score(ids[index], index, 2) for index in part)
        yield TokenOutput(
            request_id=RequestId("r"),
            token_ids=tuple(ids[index] for index in part),
            finish=FinishReason.STOP if place == len(ids) else None,
            choice=choice,
            logprobs=() if recording.logprobs is None else scores,
            prompt_logprobs=tuple(
                score(token_id, index, 2) for index, token_id in enumerate(PROMPTS[prompt][1:])
            )
            if choice == 0 and part.start == 0
            else (),
        )


def said(recording, sizes, turns):
    """The request's events. ``turns`` say whose output is next, of those that have one left."""
    count = len(recording.ids)
    request = RequestOutput(
        VOCABULARY,
        tuple(map(len, PROMPTS[:count])),
        recording.n,
        recording.stops,
        prompt_ids=PROMPTS[:count],
    )
    waiting = [
        (prompt, list(outputs(recording, prompt, choice, sizes)))
        for prompt in range(count)
        for choice in range(recording.n)
    ]
    # The engine scores a prompt before any of its choices speaks.
    found = [
        e for prompt, left in waiting[:: recording.n] for e in request.feed(left.pop(0), prompt)
    ]
    turns = iter(turns)
    while waiting := [(prompt, left) for prompt, left in waiting if left]:
        prompt, left = waiting[next(turns, 0) % len(waiting)]
        found += request.feed(left.pop(0), prompt)
    return found


def streamed(answer, found, cuts):
    """The chunks of a stream, its events in batches of these sizes, then one by one."""
    encoder = ChunkEncoder(answer, Usage(3))
    body, cuts = b"", iter(cuts)
    while found:
        size = next(cuts, 1)
        body += encoder.encode(found[:size])
        found = found[size:]
    *read, done = events(body)
    assert done == "[DONE]"
    return read


def folded(read, whole):
    """What chunks say in all, in the shape of the whole response that they are compared with."""
    choices, top = {}, {}
    for chunk in read:
        top.update({k: v for k, v in chunk.items() if k not in {"choices", "object"}})
        for piece in chunk["choices"]:
            index = piece["index"]
            choice = choices.setdefault(index, {"index": index, "logprobs": None})
            delta = piece.pop("delta", None)
            if delta is not None:
                empty = {"content": "", "refusal": None}
                message = choice.setdefault("message", empty)
                assert not ("role" in message and "role" in delta)
                message["content"] += delta.get("content", "")
                message.update({"role": delta["role"]} if "role" in delta else {})
            for name, value in piece.items():
                join(choice, name, value)
    result = {**top, "object": whole["object"]}
    result["choices"] = [choices[index] for index in sorted(choices)]
    return result


def join(choice, name, value):
    match value:
        case None:
            choice.setdefault(name, None)
        case str() if name == "text":
            choice[name] = choice.get(name, "") + value
        case list():
            choice[name] = choice.get(name, []) + value
        case dict() if choice.get(name) is not None:
            for part, items in value.items():
                if isinstance(items, list):
                    choice[name][part] += items
        case _:
            choice[name] = value


@pytest.mark.slow
@pytest.mark.parametrize(("endpoint", "prompts"), [("chat", 1), ("text", 1), ("text", 2)])
@given(data=st.data())
def test_a_stream_folds_to_the_whole_response(endpoint, prompts, data):
    recording = data.draw(recordings(prompts=prompts))
    voice, bodies = ENDPOINTS[endpoint]
    wanted = recording.wanted(echo=recording.echo and endpoint == "text")

    def answer():
        return CompletionAnswer(voice(bodies("id", 1, "m", include_usage=True), wanted))

    choices, record = {}, answer()
    for event in (whole_events := said(recording, [1], [])):
        fold(event, choices, record)
    assert isinstance(whole_events[-1], Completed)
    whole = json.loads(encode(record.body(choices, whole_events[-1].usage)))

    small = st.lists(st.integers(1, 5), max_size=9)
    found = said(recording, data.draw(small), data.draw(small))
    read = streamed(answer(), found, data.draw(small))

    assert folded(json.loads(json.dumps(read)), whole) == whole
    met = list(dict.fromkeys(c["index"] for chunk in read for c in chunk["choices"]))
    if endpoint == "chat":
        assert met == sorted(met)
    assert [chunk["choices"] for chunk in read].index([]) == len(read) - 1
