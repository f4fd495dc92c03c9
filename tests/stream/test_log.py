from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.core import FinishReason, TokenLogprobs
from triolet.errors import EngineError
from triolet.output.events import (
    ChoiceFinished,
    Completed,
    Failed,
    PromptScored,
    TextDelta,
    Usage,
)
from triolet.stream.log import EVENT_COST_BYTES, LOGPROB_COST_BYTES, TOP_COST_BYTES, StreamLog

USAGE = Usage(1)
IDS = st.lists(st.integers(0, 200_000), max_size=4)
TOPS = st.lists(st.tuples(st.integers(0, 9), st.just(-2.0)), max_size=3).map(tuple)
LOGPROBS = st.builds(TokenLogprobs, st.integers(0, 200_000), st.floats(-9, 0), st.just(1), TOPS)


@st.composite
def deltas(draw):
    """Deltas with a logprob for each id."""
    logprobs = tuple(draw(st.lists(LOGPROBS, max_size=4)))
    ids = tuple(entry.token_id for entry in logprobs)
    return TextDelta(draw(st.integers(0, 2)), draw(st.text("aé€😀", max_size=4)), ids, logprobs)


DELTAS = deltas() | st.builds(
    TextDelta, st.integers(0, 2), st.text("aé€😀", max_size=4), IDS.map(tuple)
)
SCORES = st.builds(
    PromptScored, st.integers(0, 1), st.lists(LOGPROBS, min_size=1, max_size=4).map(tuple)
)
FINISHES = st.builds(ChoiceFinished, st.integers(0, 2), st.just(FinishReason.STOP))
EVENTS = st.lists(DELTAS | DELTAS | FINISHES | SCORES, max_size=20)
# What a reader does between two events: nothing, take (within a limit), or deliver a share.
READS = st.sampled_from([None, None, "take", "take 1400", "deliver", "deliver half"])


def cost(event):
    total = EVENT_COST_BYTES
    if isinstance(event, TextDelta):
        total += len(event.text.encode()) + 8 * len(event.token_ids)
    if isinstance(event, TextDelta | PromptScored):
        total += LOGPROB_COST_BYTES * len(event.logprobs)
        total += TOP_COST_BYTES * sum(len(entry.top) for entry in event.logprobs)
    return total


def folded(events):
    """Per choice, all text, ids and logprobs and the finishes between them; scores; the end."""
    seen = {}
    for event in events:
        if isinstance(event, TextDelta):
            parts = seen.setdefault(event.choice, [["", (), ()]])
            parts[-1][0] += event.text
            parts[-1][1] += event.token_ids
            parts[-1][2] += event.logprobs
        elif isinstance(event, ChoiceFinished):
            seen.setdefault(event.choice, [["", (), ()]]).extend([event, ["", (), ()]])
        elif isinstance(event, PromptScored):
            seen.setdefault("scores", []).append(event)
        else:
            seen["end"] = event
    return seen


def play(events, reads):
    """Append with reads between; all that was taken, in order, and the log, all delivered."""
    log, taken, delivered = StreamLog(), [], 0
    for number, event in enumerate([*events, Completed(USAGE)]):
        log.append(event)
        assert log.peak_bytes >= log.undelivered_bytes
        match reads[number % len(reads)] if reads else None:
            case "take":
                taken += log.take()
            case "take 1400":
                batch = log.take(1400)
                assert len(batch) == 1 or sum(cost(event) for _, event in batch) <= 1400
                taken += batch
            case "deliver":
                delivered = len(taken)
                log.delivered(delivered)
            case "deliver half":
                delivered += (len(taken) - delivered) // 2
                log.delivered(delivered)
    waiting = log.undelivered_bytes, log.undelivered_tokens
    rest = log.take()
    left = [event for _, event in [*taken, *rest][delivered:]]
    tokens = sum(len(event.token_ids) for event in left if isinstance(event, TextDelta))
    assert waiting == (sum(map(cost, left)), tokens)
    return [*taken, *rest], log


@pytest.mark.slow
@given(EVENTS, st.lists(READS, max_size=7))
def test_no_way_of_reading_loses_repeats_or_reorders_within_a_choice(events, reads):
    taken, _ = play(events, reads)
    assert folded(event for _, event in taken) == folded([*events, Completed(USAGE)])
    assert isinstance(taken[-1][1], Completed)


@pytest.mark.slow
@given(EVENTS, st.lists(READS, max_size=7))
def test_numbers_rise_from_one_without_gaps(events, reads):
    taken, _ = play(events, reads)
    assert [seq for seq, _ in taken] == list(range(1, len(taken) + 1))


@pytest.mark.slow
@given(EVENTS, st.lists(READS, max_size=7))
def test_nothing_counts_as_undelivered_once_all_was_delivered(events, reads):
    taken, log = play(events, reads)
    log.delivered(len(taken))
    log.delivered(len(taken))
    assert (log.undelivered_bytes, log.undelivered_tokens) == (0, 0)
    assert log.take() == []


@pytest.mark.slow
@given(st.lists(DELTAS, max_size=20))
def test_without_a_reader_a_choice_waits_as_one_event(deltas):
    log = StreamLog()
    for delta in deltas:
        log.append(delta)
    choices = {delta.choice for delta in deltas}
    assert log.undelivered_bytes == sum(map(cost, deltas)) - EVENT_COST_BYTES * (
        len(deltas) - len(choices)
    )
    assert log.peak_bytes == log.undelivered_bytes
    assert len(log.take()) == len(choices)


def test_a_delta_joins_across_another_choice_but_not_across_its_own_finish():
    log = StreamLog()
    finish = ChoiceFinished(0, FinishReason.LENGTH)
    for event in (TextDelta(0, "a", (1,)), TextDelta(1, "x"), TextDelta(0, "b", (2,)), finish):
        log.append(event)
    assert log.take() == [(1, TextDelta(0, "ab", (1, 2))), (2, TextDelta(1, "x")), (3, finish)]


def test_logprobs_join_in_order_and_alone_they_are_enough_to_join():
    log = StreamLog()
    entries = [TokenLogprobs(i, -1.0, 1, ((i, -1.0),)) for i in range(4)]
    for entry in entries:
        log.append(TextDelta(0, "", (entry.token_id,), (entry,)))
    assert log.take() == [(1, TextDelta(0, "", (0, 1, 2, 3), tuple(entries)))]


def test_scores_of_a_prompt_end_nothing_and_join_nothing():
    log = StreamLog()
    scores = [PromptScored(prompt, (TokenLogprobs(1, -1.0, 1),)) for prompt in range(2)]
    events = [scores[0], TextDelta(0, "a"), scores[1], TextDelta(0, "b"), Completed(USAGE)]
    for event in events:
        log.append(event)
    assert [event for _, event in log.take()] == [
        scores[0],
        TextDelta(0, "ab"),
        scores[1],
        Completed(USAGE),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("top", [0, 5, 20])
def test_the_figure_is_true_for_logprobs_whose_reader_never_comes(top):
    """Measured, within a tenth: a bound in bytes is worth what its unit is worth."""
    log = StreamLog()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(500):
            token_id = 1000 + number
            entries = tuple(
                (5000 + number * 20 + place, -1.0 / (place + 2)) for place in range(top)
            )
            entry = TokenLogprobs(token_id, -0.5 * number, token_id + 1, entries)
            log.append(TextDelta(0, " word", (token_id,), (entry,)))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.8 * log.undelivered_bytes < after - before < 1.1 * log.undelivered_bytes


def test_what_a_reader_has_taken_never_changes():
    log = StreamLog()
    log.append(TextDelta(0, "a"))
    first = log.take()
    log.append(TextDelta(0, "b"))
    assert first == [(1, TextDelta(0, "a"))]
    assert log.take() == [(2, TextDelta(0, "b"))]


def test_a_limit_holds_back_whole_events_but_never_the_first():
    log = StreamLog()
    for choice in range(3):
        log.append(TextDelta(choice, "abc"))
    assert [seq for seq, _ in log.take(2 * (EVENT_COST_BYTES + 3))] == [1, 2]
    assert [seq for seq, _ in log.take(0)] == [3]


def test_in_flight_counts_until_delivered():
    log = StreamLog()
    log.append(TextDelta(0, "€", (7,)))
    log.take()
    assert log.undelivered_bytes == EVENT_COST_BYTES + 3 + 8
    log.delivered(1)
    assert (log.undelivered_bytes, log.peak_bytes) == (0, EVENT_COST_BYTES + 11)
    log.append(TextDelta(0, "a"))
    assert (log.undelivered_bytes, log.peak_bytes) == (EVENT_COST_BYTES + 1, EVENT_COST_BYTES + 11)


def test_delivering_what_is_still_pending_frees_nothing():
    log = StreamLog()
    log.append(TextDelta(0, "a"))
    log.delivered(1)
    assert log.undelivered_bytes == EVENT_COST_BYTES + 1


def test_the_first_end_wins_and_silence_follows():
    log = StreamLog()
    log.append(TextDelta(0, "a"))
    assert not log.ended
    failed = Failed(EngineError("The engine failed."), USAGE)
    for event in (failed, Completed(USAGE), TextDelta(0, "b")):
        log.append(event)
    assert log.ended
    assert log.take() == [(1, TextDelta(0, "a")), (2, failed)]
