from __future__ import annotations

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.strategies import chunked, every_place

from triolet.wire.codec import encode
from triolet.wire.sse import (
    DONE,
    KEEPALIVE,
    EventTooLargeError,
    SseDecoder,
    SseEvent,
    encode_data,
)


def decoded(pieces):
    decoder = SseDecoder()
    events = [event for piece in pieces for event in decoder.feed(piece)]
    return events, decoder


def events_of(stream):
    return decoded([stream])[0]


@st.composite
def encoded_streams(draw):
    """Payloads, and our encoding of them with keep-alives in between, cut somehow."""
    payloads = draw(st.lists(st.text() | st.dictionaries(st.text(), st.text()), max_size=5))
    blocks = [encode_data(encode(payload)) for payload in payloads] + [DONE]
    stream = b"".join(block for each in blocks for block in (KEEPALIVE, each))
    return payloads, draw(chunked(stream))


@pytest.mark.slow  # a hundred examples
@given(encoded_streams())
def test_what_is_encoded_is_decoded_however_it_is_cut(case):
    payloads, pieces = case
    events, decoder = decoded(pieces)
    assert events.pop() == SseEvent("[DONE]")
    assert [orjson.loads(event.data) for event in events] == payloads
    assert decoder.comments == len(payloads) + 1
    assert not decoder.finish()


LINES = st.sampled_from([
    b"data: x",
    b"data:",
    b"data",
    b"data:  two",
    "data: é🙂".encode(),
    b"data: \xff\xc3",
    b"id: 1",
    b"id",
    b"id: a\0b",
    b"event: ping",
    b"retry: 10",
    b": comment",
    b"",
    b"",
    b"\xef\xbb\xbfdata: bom",
    b"other: x",
])


@pytest.mark.slow  # a hundred examples
@given(
    st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r", b"\r\n"]))).flatmap(
        lambda lines: st.tuples(
            st.just(b"".join(line + end for line, end in lines)),
            chunked(b"".join(line + end for line, end in lines)),
        )
    )
)
@example((b"data: x\r\n\r\n", (b"data: x\r", b"\n\r", b"\n")))
@example((b"data: x\r\r", (b"data: x\r", b"\r")))
def test_the_events_do_not_depend_on_how_the_bytes_are_cut(case):
    stream, pieces = case
    whole, whole_decoder = decoded([stream])
    events, decoder = decoded(pieces)
    assert events == whole
    for name in ("last_event_id", "retry_ms", "comments"):
        assert getattr(decoder, name) == getattr(whole_decoder, name)
    assert decoder.finish() == whole_decoder.finish()


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_every_kind_of_line_end_gives_the_same_events(end):
    stream = end.join([b"id: 1", b"data: a", b"data: b", b"", b"data: c", b"", b""])
    expected = [SseEvent("a\nb", id="1"), SseEvent("c", id="1")]
    assert events_of(stream) == expected
    assert decoded(every_place(stream))[0] == expected


def test_an_event_is_dispatched_at_the_cr_and_not_at_the_byte_after_it():
    decoder = SseDecoder()
    assert decoder.feed(b"data: x\r\n\r") == [SseEvent("x")]
    assert decoder.feed(b"\n") == []
    assert not decoder.finish()


def test_one_space_after_the_colon_is_dropped_and_no_more():
    assert events_of(b"data:x\n\ndata: x\n\ndata:  x\n\n") == [
        SseEvent("x"),
        SseEvent("x"),
        SseEvent(" x"),
    ]


def test_an_event_without_data_is_not_dispatched_and_its_type_is_forgotten():
    assert events_of(b"event: ping\n\nid: 3\n\n: c\n\n\n\nretry: 1\n\ndata: x\n\n") == [
        SseEvent("x", id="3")
    ]


def test_the_example_of_the_standard_with_empty_data_lines():
    assert events_of(b"data\n\ndata\ndata\n\ndata:") == [SseEvent(""), SseEvent("\n")]


def test_an_id_holds_for_later_events_until_it_is_replaced():
    stream = b"id: 1\ndata: a\n\ndata: b\n\nid: 2\ndata: c\n\nid\ndata: d\n\n"
    assert [event.id for event in events_of(stream)] == ["1", "1", "2", ""]


def test_an_id_with_a_nul_is_ignored():
    assert events_of(b"id: 1\nid: 2\0\ndata: a\n\n") == [SseEvent("a", id="1")]


def test_the_id_to_resume_after_is_of_the_last_whole_event():
    _, decoder = decoded([b"id: 1\ndata: a\n\nid: 2\ndata: b\n"])
    assert decoder.last_event_id == "1"
    decoder.feed(b"\n")
    assert decoder.last_event_id == "2"


def test_the_type_is_of_one_event_only():
    assert events_of(b"event: error\ndata: a\n\ndata: b\n\n") == [
        SseEvent("a", "error"),
        SseEvent("b"),
    ]


def test_a_byte_order_mark_is_dropped_at_the_start_and_only_there():
    assert events_of(b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\ndata: c\n\n") == [
        SseEvent("a"),
        SseEvent("c"),
    ]


def test_invalid_utf8_is_replaced():
    assert events_of(b"data: \xff\xe2\x80\n\n") == [SseEvent("\N{REPLACEMENT CHARACTER}" * 2)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"retry: 1500", 1500),
        (b"retry: 1.5", None),
        (b"retry: -1", None),
        (b"retry:", None),
        ("retry: ٣".encode(), None),
        (b"retry: " + b"9" * 10_000, None),
    ],
)
def test_the_delay_is_a_number_of_ascii_digits(line, expected):
    assert decoded([line + b"\n"])[1].retry_ms == expected


@pytest.mark.parametrize(
    ("stream", "cut"),
    [
        (b"", False),
        (DONE, False),
        (KEEPALIVE, False),
        (b"data: x\n\n" + KEEPALIVE, False),
        (b"data: x\r\n\r", False),
        (b"data: x\n", True),
        (b"data: x", True),
        (b"d", True),
        (b"id: 3\n", True),
        (b"data: x\n\nevent: y\n", True),
        (b": keep-al", True),
    ],
)
def test_an_unfinished_event_is_reported_and_not_dispatched(stream, cut):
    decoder = SseDecoder()
    events = decoder.feed(stream)
    assert len(events) == stream.count(b"\n\n") + stream.count(b"\r\n\r")
    assert decoder.finish() is cut


@pytest.mark.parametrize(
    "pieces", [(b"data: " + b"x" * 20,), (b"xxxxx",) * 4, (b"x" * 17 + b"\n",)]
)
def test_a_line_over_the_limit_ends_the_decoder(pieces):
    decoder = SseDecoder(max_line_bytes=16)
    *before, last = pieces
    for piece in before:
        decoder.feed(piece)
    with pytest.raises(EventTooLargeError):
        decoder.feed(last)
    with pytest.raises(EventTooLargeError):
        decoder.feed(b"\n\n")


def test_a_line_at_the_limit_is_taken():
    assert SseDecoder(max_line_bytes=7).feed(b"data: x\n\n") == [SseEvent("x")]


def test_an_event_over_the_limit_ends_the_decoder():
    decoder = SseDecoder(max_event_bytes=20)
    assert decoder.feed(b"data: x\n\n" * 10) == [SseEvent("x")] * 10
    with pytest.raises(EventTooLargeError):
        decoder.feed(b"data: x\n" * 3)


def test_empty_data_lines_count_towards_the_limit_too():
    with pytest.raises(EventTooLargeError):
        SseDecoder(max_event_bytes=20).feed(b"data\n" * 6)


@pytest.mark.parametrize("payload", [b"", b"a\nb", b"a\rb"])
def test_a_payload_that_is_not_one_line_is_a_mistake_of_ours(payload):
    with pytest.raises(ValueError, match="one line"):
        encode_data(payload)


def test_the_keepalive_is_one_line_with_one_line_end():
    assert KEEPALIVE.startswith(b":")
    assert KEEPALIVE.endswith(b"\n")
    assert KEEPALIVE.count(b"\n") == 1
