"""The whole output path on the tokenizers of real models: how ids were grouped never shows."""

from __future__ import annotations

from functools import cache
from itertools import pairwise, product

import attrs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.vocabularies.real import CASES, pushed

from triolet.core import FinishReason, RequestId, TokenLogprobs, TokenOutput
from triolet.output.events import ChoiceFinished, Completed, TextDelta, Usage
from triolet.output.request import RequestOutput

pytestmark = [pytest.mark.torch, pytest.mark.slow]

#: Per tokenizer: there are ten, each loaded in up to two seconds.
EXAMPLES = 30
PROMPTS = ["", "a", "Hello", "a line\n", "é", "😀", "  "]


@attrs.frozen
class Said:
    """What a client learns of one choice, deltas joined."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    reason: FinishReason
    stop_reason: str | int | None


@attrs.frozen
class Choice:
    """What the engine generates for one choice, and after which ids its steps end."""

    ids: tuple[int, ...]
    finish: FinishReason
    stop_token_id: int | None
    cuts: tuple[int, ...]

    def outputs(self, index, *, logprobs):
        """The choice as its steps give it, the finish with the last id."""
        entries = scored(self.ids) if logprobs else ()
        borders = (0, *self.cuts, len(self.ids))
        return [
            TokenOutput(
                RequestId("r"),
                self.ids[begin:end],
                self.finish if last else None,
                self.stop_token_id if last else None,
                index,
                entries[begin:end],
            )
            for place, (begin, end) in enumerate(pairwise(borders), 1)
            for last in [place == len(borders) - 1]
        ]

    @property
    def whole(self):
        return attrs.evolve(self, cuts=())


def scored(ids):
    """One entry per id; each knows its place, so that none can stand for another."""
    return tuple(
        TokenLogprobs(token_id, -float(place), place, ((token_id, -float(place)),))
        for place, token_id in enumerate(ids, 1)
    )


def said(events, choice=0):
    deltas = [e for e in events if isinstance(e, TextDelta) and e.choice == choice]
    (end,) = (e for e in events if isinstance(e, ChoiceFinished) and e.choice == choice)
    return Said(
        "".join(delta.text for delta in deltas),
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        tuple(entry for delta in deltas for entry in delta.logprobs),
        end.reason,
        end.stop_reason,
    )


def alone(subject, choice, *, logprobs=False, **options):
    """What a choice says that is the only one and comes in one step."""
    request = RequestOutput(subject.vocabulary, (1,), **options)
    (output,) = choice.whole.outputs(0, logprobs=logprobs)
    return said(request.feed(output))


@cache
def stray_ids(subject):
    """Ids that are no whole character, and special ones."""
    parts = [i for i in subject.ids if subject.is_part_of_a_character(i)]
    return parts, sorted(subject.vocabulary.special_ids)


@st.composite
def token_ids(draw, subject):
    """Pieces of texts, and what no model would say between them: stray bytes, special tokens."""
    parts, special = stray_ids(subject)
    stray = st.sampled_from(parts) | st.sampled_from(special)
    ids = []
    for _ in range(draw(st.integers(1, 3))):
        encoded = draw(st.sampled_from(CASES[subject.name]))["ids"]
        begin = draw(st.integers(0, len(encoded) - 1))
        ids += encoded[begin : begin + draw(st.integers(1, 8))]
        ids += draw(st.lists(stray, max_size=2))
    return tuple(ids)


@cache
def prompts(subject):
    """Ids of texts, begun as the tokenizer begins them and not, and a special token alone."""
    special = [[min(subject.vocabulary.special_ids)]]
    if subject.loaded is None:
        return special + [case["ids"][:1] for case in CASES[subject.name][:6]]
    encode = subject.tokenizer.encode
    pairs = product(PROMPTS, [False, True])
    return special + [
        ids for text, begun in pairs if (ids := encode(text, add_special_tokens=begun).ids)
    ]


@st.composite
def choices(draw, subject, ids=None):
    ids = draw(token_ids(subject)) if ids is None else ids
    end = draw(st.sampled_from(["length", "eos", "stop id"]))
    # Any id may be either of these; the engine says which it was.
    last = {"length": (), "eos": (max(subject.vocabulary.special_ids),)}.get(end, (subject.anchor,))
    ids = (*ids, *last)
    # No cut behind the last id: the engine ends a choice with its last id.
    places = st.integers(0, len(ids) - 1)
    cuts = st.lists(places, max_size=8).map(sorted) | st.just(range(1, len(ids)))
    return Choice(
        ids,
        FinishReason.LENGTH if end == "length" else FinishReason.STOP,
        subject.anchor if end == "stop id" else None,
        tuple(draw(cuts)),
    )


@st.composite
def stop_strings(draw, text):
    begin = draw(st.integers(0, len(text) - 1))
    stop = text[begin : begin + draw(st.integers(1, 6))]
    # The second is held back at the end and never completed.
    return draw(st.sampled_from([stop, text[-2:] + "\0"]))


def stops_in(text):
    return st.lists(stop_strings(text), max_size=3).map(tuple) if text else st.just(())


def cut_at_stop(text, stops, *, include):
    """Text up to the stop that ends first, and that stop; or all of it, and None."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_the_grouping_of_ids_never_shows(subject, data):
    skip = data.draw(st.booleans(), "skip_special_tokens")
    logprobs = data.draw(st.booleans(), "logprobs")
    crowd = [data.draw(choices(subject)) for _ in range(data.draw(st.integers(1, 2), "n"))]
    text = "".join(alone(subject, c, skip_special_tokens=skip).text for c in crowd)
    options = {
        "stops": data.draw(stops_in(text), "stops"),
        "include_stop": data.draw(st.booleans(), "include_stop"),
        "min_tokens": data.draw(st.integers(0, 12), "min_tokens"),
        "skip_special_tokens": skip,
    }
    request = RequestOutput(subject.vocabulary, (5,), len(crowd), **options)
    queues = [choice.outputs(i, logprobs=logprobs) for i, choice in enumerate(crowd)]
    events = []
    while waiting := [queue for queue in queues if queue]:
        queue = data.draw(st.sampled_from(waiting)) if len(waiting) > 1 else waiting[0]
        events += request.feed(queue.pop(0))

    results = [said(events, index) for index in range(len(crowd))]
    assert results == [alone(subject, c, logprobs=logprobs, **options) for c in crowd]
    for choice, result in zip(crowd, results, strict=True):
        accepted = len(result.ids)
        assert result.ids == choice.ids[:accepted]
        assert result.logprobs == (scored(choice.ids)[:accepted] if logprobs else ())
    for delta in (event for event in events if isinstance(event, TextDelta)):
        assert [entry.token_id for entry in delta.logprobs] == [*delta.token_ids] * logprobs
    usage = Usage(5, sum(len(result.ids) for result in results))
    assert request.usage == usage
    assert [event for event in events if isinstance(event, Completed)] == [Completed(usage)]
    assert events[-1] == Completed(usage)


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_a_stop_cuts_the_text_where_it_would_cut_the_whole(subject, data):
    choice = data.draw(choices(subject).filter(lambda c: c.finish is FinishReason.LENGTH))
    include = data.draw(st.booleans(), "include_stop")
    text = alone(subject, choice).text
    stops = data.draw(stops_in(text), "stops")
    request = RequestOutput(subject.vocabulary, (5,), 1, stops, include)
    events = [e for output in choice.outputs(0, logprobs=False) for e in request.feed(output)]

    result = said(events)
    shown, stop = cut_at_stop(text, stops, include=include)
    reason = FinishReason.LENGTH if stop is None else FinishReason.STOP
    assert (result.text, result.reason, result.stop_reason) == (shown, reason, stop)
    # The stop comes with the id that completes it: one less and it is not there yet.
    if stop is not None:
        before = attrs.evolve(choice, ids=result.ids[:-1], cuts=())
        assert "".join(pushed(subject.vocabulary, before.ids, skip=True)[:-1]).find(stop) < 0


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_without_stops_the_text_is_what_the_output_adds_to_the_prompt(subject, data):
    skip = data.draw(st.booleans(), "skip_special_tokens")
    prompt = data.draw(st.sampled_from(prompts(subject)), "prompt")
    choice = data.draw(choices(subject).filter(lambda c: c.stop_token_id is None))
    request = RequestOutput(
        subject.vocabulary,
        (len(prompt),),
        skip_special_tokens=skip,
        prompt_ids=(prompt,),
    )
    events = [e for output in choice.outputs(0, logprobs=False) for e in request.feed(output)]

    # The id that says the end adds no text, even where special tokens are shown.
    ids = choice.ids[:-1] if choice.finish is FinishReason.STOP else choice.ids
    added = subject.added(prompt, ids, skip=skip)
    if subject.byte_fallback and (added is None or "\ufffd" in added):
        # The documented exception; it is said for texts that something came before.
        assume(not (skip and subject.vocabulary.special_ids.issuperset(prompt)))
        added = subject.expected(ids, skip=skip)
    assert said(events).text == added
