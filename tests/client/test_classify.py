"""Bytes in, events and a verdict out, however the bytes are cut."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import chunked

from triolet.client.classify import Ending, Instant, StreamClassifier
from triolet.client.errors import StreamCutError, StreamFailedError

NOW = Instant(0.0, 0)
DONE = b"data: [DONE]\n\n"


def chat(text, *, index=0, reason=None, **more):
    choice = {"index": index, "delta": {"content": text}, "finish_reason": reason}
    return event({"id": "chatcmpl-1", "choices": [choice], **more})


def event(data):
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def read(*pieces, end=True):
    reader = StreamClassifier()
    events = [found for piece in pieces for found in reader.feed(piece, NOW)]
    if end:
        reader.end()
    return events, reader


BLOCKS = st.sampled_from([
    chat("héllo 🎭"),
    chat(None, role="x"),
    chat("b", index=1, reason="length"),
    chat("c", reason="stop"),
    b'data:{"choices":[{"text":"no space"}]}\r\n\r\n',
    b'event: x\nid: 7\ndata: {"choices":[]}\n\n',
    event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}),
    event({"error": {"message": "no", "code": 503}}),
    event({"object": "error", "message": "old"}),
    b"event: error\ndata: plain words\n\n",
    b": keep-alive\n",
    b": ping\r\n\r\n",
    b"data: not json\n\n",
    b"data:\n\n",
    b"data: [1, 2]\n\n",
    b"data: {half",
    DONE,
    b"data:[DONE]\n\n",
])
STREAMS = st.lists(BLOCKS, max_size=8).map(b"".join)


def facts(events, reader):
    """All that must not depend on how the bytes were cut."""
    told = [attrs.evolve(found, read=0) for found in events]
    return (
        told, reader.outcome, reader.usage, reader.response_id, reader.finish_reasons,
        reader.events, reader.unreadable,
    )  # fmt: skip


@pytest.mark.slow  # a hundred examples
@given(STREAMS.flatmap(lambda stream: st.tuples(st.just(stream), chunked(stream))))
def test_events_and_verdict_do_not_depend_on_the_cuts(case):
    stream, pieces = case

    assert facts(*read(*pieces)) == facts(*read(stream))


@pytest.mark.slow  # a hundred examples
@given(STREAMS, st.binary(max_size=20))
def test_every_stream_has_one_end_and_nothing_after_it_is_read(stream, junk):
    events, reader = read(stream)
    verdict = reader.outcome

    assert verdict.ending in Ending
    assert (verdict.failure() is None) == (verdict.ending is Ending.DONE)
    assert reader.feed(junk, NOW) == []
    assert reader.end() is reader.cut("late") is verdict
    assert [found.number for found in events] == list(range(1, len(events) + 1))


def test_done_is_done_and_the_error_event_before_it_is_not():
    assert read(chat("a"), DONE)[1].outcome.ending is Ending.DONE

    failed = read(chat("a"), event({"error": {"message": "gone", "code": "shutdown"}}), DONE)[1]

    assert failed.outcome.ending is Ending.ERROR
    failure = failed.outcome.failure()
    assert isinstance(failure, StreamFailedError)
    assert (failure.message, failure.code, failure.status) == ("gone", "shutdown", 500)


@pytest.mark.parametrize(
    ("stream", "finished", "says"),
    [
        (b"", False, "without [DONE]"),
        (chat("a"), False, "without [DONE]"),
        (chat("a", reason="stop"), True, "without [DONE]"),
        (chat("a", reason="stop") + chat("b", index=1), False, "without [DONE]"),
        (chat("a", reason="stop") + b"data: [DO", False, "inside an event"),
    ],
)
def test_an_end_without_done_is_truncated_but_may_be_finished(stream, finished, says):
    outcome = read(stream)[1].outcome

    assert outcome.ending is Ending.TRUNCATED
    assert outcome.finished is finished
    assert says in outcome.detail
    assert isinstance(outcome.failure(), StreamCutError)


def test_a_body_that_was_cut_is_never_finished():
    reader = read(chat("a", reason="stop"), end=False)[1]

    assert reader.cut("connection reset").finished is False


def test_events_carry_their_read_and_their_time():
    reader = StreamClassifier()
    first = reader.feed(chat("a") + chat("b")[:9], Instant(1.0, 10))
    second = reader.feed(chat("b")[9:] + chat("c"), Instant(2.0, 20))

    assert [(e.text, e.read, e.at.trio_s) for e in first + second] == [
        ("a", 1, 1.0),
        ("b", 2, 2.0),
        ("c", 2, 2.0),
    ]
    assert (reader.reads, reader.bytes_read) == (2, len(chat("a") * 3))


def test_usage_is_the_last_one_and_comments_are_counted():
    _, reader = read(
        chat("a", usage={"prompt_tokens": 1, "completion_tokens": 1}),
        b": keep-alive\n",
        chat("b", usage=None),
        event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}),
        DONE,
    )

    assert reader.usage.completion_tokens == 2
    assert reader.comments == 1
    assert reader.response_id == "chatcmpl-1"


def test_what_is_no_json_is_an_event_without_meaning():
    events, reader = read(b"data: ping\n\n", b'data: {"n": NaN}\n\n', b"data: " + b"[" * 10_000)

    assert [found.data.keys() for found in events] == [set(), {"n"}]
    assert reader.unreadable == 1


def test_a_line_without_end_is_cut_off():
    reader = StreamClassifier()
    piece = b"x" * (1024 * 1024)
    for _ in range(17):
        reader.feed(piece, NOW)

    assert reader.outcome.ending is Ending.TRUNCATED
    assert "bytes" in reader.outcome.detail
