from __future__ import annotations

import codecs
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from triolet.core import FinishReason, RequestId, TokenLogprobs, TokenOutput, Vocabulary
from triolet.errors import EngineError, InvalidRequestError, OutputError
from triolet.output.events import (
    ChoiceFinished,
    Completed,
    Failed,
    PromptScored,
    TextDelta,
    Usage,
)
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


def output(*ids, finish=None, stop_token_id=None, choice=0, logprobs=(), prompt_logprobs=()):
    return TokenOutput(
        RequestId("r"), ids, finish, stop_token_id, choice, tuple(logprobs), tuple(prompt_logprobs)
    )


def scored(ids):
    """One entry per id; each knows its place, so that none can stand for another."""
    return tuple(
        TokenLogprobs(token_id, -float(place), 1, ((token_id, -float(place)), (0, -9.0)))
        for place, token_id in enumerate(ids, 1)
    )


def grouped(ids, end, cuts, choice=0, *, logprobs=False):
    """The ids of a choice as engine outputs, the end with the last id; some are empty."""
    if end != "length":
        ids = (*ids, EOS if end == "eos" else STOP_ID)
    entries = scored(ids) if logprobs else ()
    # No cut behind the last id: the engine ends a choice with its last id.
    borders = [0, *sorted(min(cut, max(len(ids) - 1, 0)) for cut in cuts)]
    head = [output(*ids[a:b], choice=choice, logprobs=entries[a:b]) for a, b in pairwise(borders)]
    last = output(
        *ids[borders[-1] :],
        finish=FinishReason.LENGTH if end == "length" else FinishReason.STOP,
        stop_token_id=STOP_ID if end == "stop id" else None,
        choice=choice,
        logprobs=entries[borders[-1] :],
    )
    return [*head, last]


def text_of(ids, *, skip, final):
    data = b"".join(VOCABULARY.token_bytes[i] for i in ids if not (skip and i == EOS))
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final)


def cut_at_stop(text, stops, include, after=0):
    """Text up to the first stop that ends behind ``after``, and the stop; or ``None``."""
    for end in range(after + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return None


def reference(ids, end, stops, *, include, skip, min_tokens=0):
    """What a choice must say: text, ids, reason, stop reason. Looks at whole texts only."""
    known = 0
    for count in range(1, len(ids) + 1):
        text = text_of(ids[:count], skip=skip, final=False)
        hit = cut_at_stop(text, stops, include, known) if count >= min_tokens else None
        if hit is not None:
            return hit[0], ids[:count], FinishReason.STOP, hit[1]
        known = len(text)
    text = text_of(ids, skip=skip, final=True)
    if end == "eos":
        return text, (*ids, EOS), FinishReason.STOP, None
    if end == "stop id":
        if include:
            text = text_of((*ids, STOP_ID), skip=skip, final=True)
        return text, (*ids, STOP_ID), FinishReason.STOP, STOP_ID
    hit = cut_at_stop(text, stops, include, known) if len(ids) >= min_tokens else None
    if hit is not None:
        return hit[0], ids, FinishReason.STOP, hit[1]
    return text, ids, FinishReason.LENGTH, None


def deltas_of(events, choice):
    return [e for e in events if isinstance(e, TextDelta) and e.choice == choice]


def said(events, choice=0):
    """Joined text and ids of one choice, and its finish."""
    deltas = deltas_of(events, choice)
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
    request = RequestOutput(VOCABULARY, (5,), 1, stops, include, skip)
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
    request = RequestOutput(VOCABULARY, (5,), 1, stops, include)
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


@st.composite
def crowds(draw):
    """Prompts, choices of each, and per choice its ids, end and grouping."""
    prompts, n = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    size = prompts * n
    return prompts, n, draw(st.lists(st.tuples(IDS, ENDS, CUTS), min_size=size, max_size=size))


@pytest.mark.slow
@given(
    crowd=crowds(),
    stops=STOPS,
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
    logprobs=st.booleans(),
    random=st.randoms(),
)
def test_however_ids_are_grouped_and_mixed_each_choice_says_what_it_says_alone(
    crowd, stops, min_tokens, include, logprobs, random
):
    """Text, ids, logprobs, finishes and usage at once: the whole output path."""
    prompts, n, choices = crowd
    queues = {
        (index // n, index % n): grouped(ids, end, cuts, index % n, logprobs=logprobs)
        for index, (ids, end, cuts) in enumerate(choices)
    }
    request = RequestOutput(
        VOCABULARY, tuple(range(7, 7 + prompts)), n, stops, include, min_tokens=min_tokens
    )
    events, told = [], []
    while any(queues.values()):
        prompt, number = random.choice([place for place, queue in queues.items() if queue])
        events += request.feed(queues[prompt, number].pop(0), prompt)
        for place in request.choices_to_end:
            request.choice_left_engine(*place)
            assert place[0] not in request.prompts_to_abort
            told.append(place)
    # Of a choice that was ended only, and once; the last of a prompt is aborted with it.
    assert len(set(told)) == len(told)
    assert all(sum(place[0] == prompt for place in told) < n for prompt in range(prompts))
    accepted = 0
    for choice, (ids, end, _) in enumerate(choices):
        text, own_ids, *finish = reference(
            ids, end, stops, include=include, skip=True, min_tokens=min_tokens
        )
        assert said(events, choice) == (text, own_ids, tuple(finish))
        entries = tuple(e for delta in deltas_of(events, choice) for e in delta.logprobs)
        assert entries == (scored(own_ids) if logprobs else ())
        accepted += len(own_ids)
    for event in events:
        if isinstance(event, TextDelta) and logprobs:
            assert tuple(e.token_id for e in event.logprobs) == event.token_ids
    assert events[-1] == Completed(Usage(sum(range(7, 7 + prompts)), accepted))
    assert sum(isinstance(event, Completed | Failed) for event in events) == 1
    assert request.prompts_in_engine == request.prompts_to_abort == ()


@pytest.mark.parametrize(
    ("min_tokens", "ids", "text", "count"),
    [
        (1, (0, 1), "", 2),  # "ab" ends with token 2
        (2, (0, 1), "", 2),
        (3, (0, 1, 0, 1), "ab", 4),  # the first match is text, the second a stop
        (3, (0, 1, 2), "ab", 3),  # a match within the token that reaches the minimum
    ],
)
def test_a_stop_string_counts_from_the_token_that_completes_it(min_tokens, ids, text, count):
    request = RequestOutput(VOCABULARY, (5,), stops=("ab",), min_tokens=min_tokens)
    events = feed_all(request, [output(token_id) for token_id in ids])
    assert said(events) == (text, ids[:count], (FinishReason.STOP, "ab"))


def test_a_stop_that_began_before_the_minimum_is_cut_from_where_it_began():
    request = RequestOutput(VOCABULARY, (5,), stops=("aaa",), min_tokens=4)
    events = feed_all(request, [output(0)] * 4)
    assert said(events) == ("a", (0,) * 4, (FinishReason.STOP, "aaa"))


def test_text_that_only_the_end_makes_certain_counts_with_the_last_token():
    for min_tokens, reason in ((1, FinishReason.STOP), (2, FinishReason.LENGTH)):
        request = RequestOutput(VOCABULARY, (5,), stops=("\ufffd",), min_tokens=min_tokens)
        events = request.feed(output(4, finish=FinishReason.LENGTH))
        assert events[-2].reason is reason


def test_scores_of_a_prompt_come_once_and_before_its_text():
    request = RequestOutput(VOCABULARY, (2, 2))
    second, first = scored((1,)), scored((0,))
    assert request.feed(output(0, prompt_logprobs=second), 1) == [
        PromptScored(1, second),
        TextDelta(1, "a", (0,)),
    ]
    assert request.feed(output(prompt_logprobs=first)) == [PromptScored(0, first)]
    # Computed again after a preemption, they are no news.
    assert request.feed(output(1, prompt_logprobs=first)) == [TextDelta(0, "b", (1,))]


def test_scores_that_came_with_a_bad_id_are_not_lost():
    request = RequestOutput(VOCABULARY, (2,))
    with pytest.raises(OutputError):
        request.feed(output(0, HOLE, prompt_logprobs=scored((1,)), logprobs=scored((0, HOLE))))
    assert request.fail(ERROR) == [
        PromptScored(0, scored((1,))),
        TextDelta(0, "a", (0,), scored((0,))),
        Failed(ERROR, Usage(2, 1)),
    ]


def test_logprobs_that_do_not_fit_the_ids_are_an_error_of_this_request():
    request = RequestOutput(VOCABULARY, (5,))
    with pytest.raises(OutputError):
        request.feed(output(0, 1, logprobs=scored((0,))))
    assert request.fail(ERROR) == [Failed(ERROR, Usage(5))]


def test_text_may_be_held_but_its_ids_are_not():
    request = RequestOutput(VOCABULARY, (5,), 1, ("ab",))
    assert request.feed(output(0)) == [TextDelta(0, "", (0,))]
    assert request.feed(output(4)) == [TextDelta(0, "", (4,))]
    assert request.feed(output(0)) == [TextDelta(0, "a\ufffd", (0,))]
    assert request.feed(output()) == []


def test_a_failure_says_nothing_more_of_a_choice_that_finished():
    vocabulary = Vocabulary((b"b" + EURO[:1], b"a"))
    request = RequestOutput(vocabulary, (5,), 2, ("b",))
    request.feed(output(0))
    assert request.fail(ERROR) == [Failed(ERROR, Usage(5, 1))]


def test_a_stop_string_wins_over_a_later_end_and_drops_later_ids():
    request = RequestOutput(VOCABULARY, (5,), 1, ("ab",))
    assert request.feed(output(1, 2, 0, EOS, finish=FinishReason.STOP)) == [
        TextDelta(0, "b", (1, 2)),
        ChoiceFinished(0, FinishReason.STOP, "ab"),
        Completed(Usage(5, 2)),
    ]


def test_a_stop_string_wins_over_the_length_at_the_same_token():
    request = RequestOutput(VOCABULARY, (5,), 1, ("b",))
    events = request.feed(output(0, 2, finish=FinishReason.LENGTH))
    assert said(events) == ("aa", (0, 2), (FinishReason.STOP, "b"))


def test_an_end_that_comes_without_ids_cuts_nothing():
    request = RequestOutput(VOCABULARY, (5,), 1, ("ab",))
    request.feed(output(0))
    assert request.feed(output(finish=FinishReason.STOP)) == [
        TextDelta(0, "a"),
        ChoiceFinished(0, FinishReason.STOP),
        Completed(Usage(5, 1)),
    ]


def test_the_caller_learns_that_the_engine_runs_on():
    stopped = RequestOutput(VOCABULARY, (5,), stops=("ab",))
    stopped.feed(output(2))
    assert stopped.prompts_to_abort == (0,)
    stopped.left_engine(0)
    assert stopped.prompts_to_abort == stopped.prompts_in_engine == ()
    ended = RequestOutput(VOCABULARY, (5,), stops=("ab",))
    ended.feed(output(2, finish=FinishReason.LENGTH))
    assert ended.prompts_to_abort == ended.prompts_in_engine == ()


def test_a_prompt_is_to_be_aborted_once_all_its_choices_have_finished():
    request = RequestOutput(VOCABULARY, (5, 5), 2, ("ab",))
    request.feed(output(2), 1)
    assert request.prompts_to_abort == ()
    assert request.feed(output(0), 1) == []
    request.feed(output(0, EOS, finish=FinishReason.STOP, choice=1), 1)
    assert request.prompts_to_abort == (1,)
    assert request.prompts_in_engine == (0, 1)
    assert not request.ended


def test_a_choice_that_stopped_by_text_is_to_be_ended_while_others_go_on():
    request = RequestOutput(VOCABULARY, (5, 5), 3, ("ab",))
    request.feed(output(2, choice=1), 1)
    assert request.choices_to_end == ((1, 1),)
    assert request.choices_to_end == ((1, 1),)
    request.choice_left_engine(1, 1)
    assert request.choices_to_end == ()
    # What was under way is neither news nor a reason to say it again.
    assert request.feed(output(0, choice=1), 1) == []
    assert request.choices_to_end == ()
    request.feed(output(0, finish=FinishReason.LENGTH), 1)
    request.feed(output(0, finish=FinishReason.LENGTH, choice=2), 1)
    assert request.prompts_in_engine == (0,)
    assert request.prompts_to_abort == request.choices_to_end == ()


def test_the_last_choice_is_not_ended_but_its_prompt_aborted():
    request = RequestOutput(VOCABULARY, (5,), 2, ("ab",))
    request.feed(output(2))
    request.feed(output(2, choice=1))
    assert request.choices_to_end == ()
    assert request.prompts_to_abort == (0,)


def test_a_choice_needs_no_end_once_the_engine_ended_it_too():
    request = RequestOutput(VOCABULARY, (5,), 2, ("ab",))
    request.feed(output(2, finish=FinishReason.LENGTH))
    assert request.choices_to_end == ()
    request = RequestOutput(VOCABULARY, (5,), 2, ("ab",))
    request.feed(output(2))
    request.feed(output(finish=FinishReason.LENGTH))
    assert request.choices_to_end == ()


def test_after_a_failure_single_choices_need_no_end():
    request = RequestOutput(VOCABULARY, (5,), 2, ("ab",))
    request.feed(output(2))
    request.fail(ERROR)
    assert request.choices_to_end == ()
    assert request.prompts_to_abort == (0,)
    request = RequestOutput(VOCABULARY, (5,), 2, ("ab",))
    request.feed(output(2))
    request.left_engine(0)
    assert request.choices_to_end == ()


def test_a_choice_that_stopped_by_text_needs_no_abort_once_the_engine_ended_it_too():
    request = RequestOutput(VOCABULARY, (5,), 2, ("ab",))
    request.feed(output(2))
    assert request.prompts_to_abort == ()
    assert request.feed(output(0, finish=FinishReason.LENGTH)) == []
    request.feed(output(0, EOS, finish=FinishReason.STOP, choice=1))
    assert request.ended
    assert request.prompts_to_abort == ()


def test_an_engine_that_ends_late_needs_no_abort_either():
    request = RequestOutput(VOCABULARY, (5,), stops=("ab",))
    request.feed(output(2))
    assert request.feed(output(0, finish=FinishReason.LENGTH)) == []
    assert request.prompts_to_abort == ()


def test_after_a_failure_whatever_the_engine_runs_is_to_be_aborted():
    request = RequestOutput(VOCABULARY, (5, 5, 5))
    request.feed(output(0, finish=FinishReason.LENGTH), 0)
    request.left_engine(1)
    request.fail(ERROR)
    assert request.prompts_to_abort == (2,)


def test_each_prompt_begins_its_choices_as_its_own_ids_say():
    """A vocabulary whose decoder takes a space off where the text begins."""
    vocabulary = Vocabulary((b" a", b"<s>"), frozenset({1}), leading_spaces=1)
    request = RequestOutput(vocabulary, (1, 1), 2, prompt_ids=((0,), (1,)))
    for prompt in range(2):
        assert request.feed(output(0, choice=1), prompt) == [
            TextDelta(2 * prompt + 1, "a" if prompt else " a", (0,))
        ]


def test_what_others_learn_of_the_usage_is_passed_on():
    request = RequestOutput(VOCABULARY, (5, 6), 2)
    request.cached_tokens, request.reasoning_tokens = 4, 3
    assert request.usage == Usage(11, 0, 4, 3)


@pytest.mark.parametrize(("prompt", "choice"), [(0, -1), (0, 1), (-1, 0), (1, 0)])
def test_a_choice_nobody_asked_for_is_an_error_of_this_request(prompt, choice):
    request = RequestOutput(VOCABULARY, (5,))
    with pytest.raises(OutputError):
        request.feed(output(0, choice=choice), prompt)
    assert request.fail(ERROR) == [Failed(ERROR, Usage(5))]
    assert request.feed(output(0, choice=choice), prompt) == []


def test_an_empty_stop_is_refused_at_the_start():
    with pytest.raises(InvalidRequestError):
        RequestOutput(VOCABULARY, (5,), 1, ("",))


def test_nothing_piles_up_over_a_long_output():
    request = RequestOutput(VOCABULARY, (5,), 1, ("b.b.b",))
    for _ in range(2000):
        request.feed(output(0, 4))
    ((choice,),) = request._choices
    assert (choice.text, choice.ids, choice.logprobs, choice.matcher._held) == ([], [], [], "")
