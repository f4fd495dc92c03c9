from __future__ import annotations

import codecs
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from triolet.core import FinishReason, RequestId, TokenOutput, Vocabulary
from triolet.errors import EngineError, InvalidRequestError, OutputError
from triolet.output.events import ChoiceFinished, Completed, Failed, TextDelta, Usage
from triolet.output.request import RequestOutput

EURO = "€".encode()
TOKENS = (b"a", b"b", b"ab", b"ba.b", EURO[:1], EURO[1:2], EURO[2:], b"\xff", "\ufffd".encode())
EOS, STOP_ID, HOLE = 9, 10, 11
VOCABULARY = Vocabulary((*TOKENS, b"<end>", b"<stop>", None), frozenset({EOS}))
ERROR = EngineError("The engine failed.")

IDS = st.lists(st.integers(0, len(TOKENS) - 1) | st.just(EOS), max_size=12).map(tuple)
STOPS = st.lists(
    st.text("ab.", min_size=1, max_size=4) | st.sampled_from(["€", "\ufffd", "a\ufffd"]),
    max_size=3,
).map(tuple)
ENDS = st.sampled_from(["eos", "stop id", "length"])
CUTS = st.lists(st.integers(0, 12), max_size=6)


def output(*ids, finish=None, stop_token_id=None, choice=0):
    return TokenOutput(RequestId("r"), ids, finish, stop_token_id, choice)


def grouped(ids, end, cuts, choice=0):
    """The ids of a choice as engine outputs, the end with the last id; some are empty."""
    if end != "length":
        ids = (*ids, EOS if end == "eos" else STOP_ID)
    finish = FinishReason.LENGTH if end == "length" else FinishReason.STOP
    stop_token_id = STOP_ID if end == "stop id" else None
    # No cut behind the last id: the engine ends a choice with its last id.
    borders = [0, *sorted(min(cut, max(len(ids) - 1, 0)) for cut in cuts)]
    head = [output(*ids[a:b], choice=choice) for a, b in pairwise(borders)]
    last = ids[borders[-1] :]
    return [*head, output(*last, finish=finish, stop_token_id=stop_token_id, choice=choice)]


def text_of(ids, *, skip, final):
    data = b"".join(VOCABULARY.token_bytes[i] for i in ids if not (skip and i == EOS))
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final)


def cut_at_stop(text, stops, include):
    """Text up to the first stop and the stop, by searching the whole text; or ``None``."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return None


def reference(ids, end, stops, *, include, skip):
    """What a choice must say: text, ids, reason, stop reason. Looks at whole texts only."""
    for count in range(1, len(ids) + 1):
        hit = cut_at_stop(text_of(ids[:count], skip=skip, final=False), stops, include)
        if hit is not None:
            return hit[0], ids[:count], FinishReason.STOP, hit[1]
    text = text_of(ids, skip=skip, final=True)
    if end == "eos":
        return text, (*ids, EOS), FinishReason.STOP, None
    if end == "stop id":
        if include:
            text = text_of((*ids, STOP_ID), skip=skip, final=True)
        return text, (*ids, STOP_ID), FinishReason.STOP, STOP_ID
    hit = cut_at_stop(text, stops, include)
    if hit is not None:
        return hit[0], ids, FinishReason.STOP, hit[1]
    return text, ids, FinishReason.LENGTH, None


def said(events, choice=0):
    """Joined text and ids of one choice, and its finish."""
    deltas = [e for e in events if isinstance(e, TextDelta) and e.choice == choice]
    text = "".join(delta.text for delta in deltas)
    ids = tuple(i for delta in deltas for i in delta.token_ids)
    ends = [e for e in events if isinstance(e, ChoiceFinished) and e.choice == choice]
    return (text, ids, *((end.reason, end.stop_reason) for end in ends))


def feed_all(request, outputs):
    return [event for item in outputs for event in request.feed(item)]


@pytest.mark.slow
@given(ids=IDS, end=ENDS, stops=STOPS, cuts=CUTS, include=st.booleans(), skip=st.booleans())
@example(ids=(0, 4), end="length", stops=("a\ufffd",), cuts=[], include=False, skip=True)
@example(ids=(0, 4), end="eos", stops=("a\ufffd",), cuts=[], include=False, skip=True)
@example(ids=(4, EOS, 5, 6), end="length", stops=("€",), cuts=[2], include=False, skip=True)
@example(ids=(0, 2, 0), end="eos", stops=("ab",), cuts=[], include=False, skip=True)
@example(ids=(0,), end="stop id", stops=("ab",), cuts=[], include=False, skip=True)
def test_the_grouping_of_ids_never_shows(ids, end, stops, cuts, include, skip):
    request = RequestOutput(VOCABULARY, 5, stops, include, skip)
    events = feed_all(request, grouped(ids, end, cuts))
    text, accepted, reason, stop_reason = reference(ids, end, stops, include=include, skip=skip)
    assert said(events) == (text, accepted, (reason, stop_reason))
    # One terminal event, last, after the finish.
    assert events[-2:] == [
        ChoiceFinished(0, reason, stop_reason),
        Completed(Usage(5, len(accepted))),
    ]
    assert request.ended
    assert request.usage == Usage(5, len(accepted))
    assert all(event.text or event.token_ids for event in events[:-2])


@pytest.mark.slow
@given(IDS, STOPS, CUTS, st.booleans(), st.booleans())
def test_a_failure_shows_all_accepted_text_first_and_then_silence(ids, stops, cuts, include, bad):
    """With a bad id in the last output too: the ids before it are neither lost nor repeated."""
    request = RequestOutput(VOCABULARY, 5, stops, include)
    outputs = [item for item in grouped(ids, "length", cuts) if item.finish is None]
    events = feed_all(request, outputs)
    if request.ended:
        assert request.fail(ERROR) == []
        return
    if bad:
        tail = ids[sum(len(item.token_ids) for item in outputs) :]
        stopped = text_of(ids, skip=True, final=False)
        if cut_at_stop(stopped, stops, include) is not None:
            # The stop comes first, so the bad id is never looked at.
            events += request.feed(output(*tail, HOLE))
            text, accepted, *finish = reference(ids, "length", stops, include=include, skip=True)
            assert said(events) == (text, accepted, tuple(finish))
            return
        with pytest.raises(OutputError):
            request.feed(output(*tail, HOLE))
        assert request.feed(output(0)) == []
        assert not request.ended
    else:
        ids = ids[: sum(len(item.token_ids) for item in outputs)]
    events += request.fail(ERROR)
    assert said(events) == (text_of(ids, skip=True, final=True), ids)
    assert events[-1] == Failed(ERROR, Usage(5, len(ids)))
    assert request.ended
    assert request.fail(ERROR) == request.feed(output(0)) == []


@pytest.mark.slow
@given(st.lists(st.tuples(IDS, ENDS, CUTS), min_size=1, max_size=3), STOPS, st.randoms())
def test_each_choice_says_what_it_says_alone(choices, stops, random):
    queues = [grouped(ids, end, cuts, choice) for choice, (ids, end, cuts) in enumerate(choices)]
    request = RequestOutput(VOCABULARY, 5, stops, choices=len(choices))
    events = []
    while any(queues):
        events += request.feed(random.choice([queue for queue in queues if queue]).pop(0))
    accepted = 0
    for choice, (ids, end, _) in enumerate(choices):
        text, own_ids, *finish = reference(ids, end, stops, include=False, skip=True)
        assert said(events, choice) == (text, own_ids, tuple(finish))
        accepted += len(own_ids)
    assert events[-1] == Completed(Usage(5, accepted))
    assert sum(isinstance(event, Completed | Failed) for event in events) == 1


def test_text_may_be_held_but_its_ids_are_not():
    request = RequestOutput(VOCABULARY, 5, ("ab",))
    assert request.feed(output(0)) == [TextDelta(0, "", (0,))]
    assert request.feed(output(4)) == [TextDelta(0, "", (4,))]
    assert request.feed(output(0)) == [TextDelta(0, "a\ufffd", (0,))]
    assert request.feed(output()) == []


def test_a_failure_says_nothing_more_of_a_choice_that_finished():
    vocabulary = Vocabulary((b"b" + EURO[:1], b"a"))
    request = RequestOutput(vocabulary, 5, ("b",), choices=2)
    request.feed(output(0))
    assert request.fail(ERROR) == [Failed(ERROR, Usage(5, 1))]


def test_a_stop_string_wins_over_a_later_end_and_drops_later_ids():
    request = RequestOutput(VOCABULARY, 5, ("ab",))
    assert request.feed(output(1, 2, 0, EOS, finish=FinishReason.STOP)) == [
        TextDelta(0, "b", (1, 2)),
        ChoiceFinished(0, FinishReason.STOP, "ab"),
        Completed(Usage(5, 2)),
    ]


def test_a_stop_string_wins_over_the_length_at_the_same_token():
    request = RequestOutput(VOCABULARY, 5, ("b",))
    events = request.feed(output(0, 2, finish=FinishReason.LENGTH))
    assert said(events) == ("aa", (0, 2), (FinishReason.STOP, "b"))


def test_an_end_that_comes_without_ids_cuts_nothing():
    request = RequestOutput(VOCABULARY, 5, ("ab",))
    request.feed(output(0))
    assert request.feed(output(finish=FinishReason.STOP)) == [
        TextDelta(0, "a"),
        ChoiceFinished(0, FinishReason.STOP),
        Completed(Usage(5, 1)),
    ]


def test_the_caller_learns_that_the_engine_runs_on():
    stopped = RequestOutput(VOCABULARY, 5, ("ab",))
    stopped.feed(output(2))
    assert stopped.finished_by_text
    ended = RequestOutput(VOCABULARY, 5, ("ab",))
    ended.feed(output(2, finish=FinishReason.LENGTH))
    assert not ended.finished_by_text


def test_a_choice_that_stopped_by_text_needs_no_abort_once_the_engine_ended_it_too():
    request = RequestOutput(VOCABULARY, 5, ("ab",), choices=2)
    request.feed(output(2))
    assert not request.finished_by_text
    assert request.feed(output(0, finish=FinishReason.LENGTH)) == []
    request.feed(output(0, EOS, finish=FinishReason.STOP, choice=1))
    assert request.ended
    assert not request.finished_by_text


@pytest.mark.parametrize("choice", [-1, 1])
def test_a_choice_nobody_asked_for_is_an_error_of_this_request(choice):
    request = RequestOutput(VOCABULARY, 5)
    with pytest.raises(OutputError):
        request.feed(output(0, choice=choice))
    assert request.fail(ERROR) == [Failed(ERROR, Usage(5))]


def test_an_empty_stop_is_refused_at_the_start():
    with pytest.raises(InvalidRequestError):
        RequestOutput(VOCABULARY, 5, ("",))


def test_nothing_piles_up_over_a_long_output():
    request = RequestOutput(VOCABULARY, 5, ("b.b.b",))
    for _ in range(2000):
        request.feed(output(0, 4))
    (choice,) = request._choices
    assert (choice.text, choice.ids, choice.matcher._held) == ([], [], "")
