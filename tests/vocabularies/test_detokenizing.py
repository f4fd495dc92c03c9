"""The rules of the detokenizer, on the tokenizers of real models."""

from __future__ import annotations

import random

import attrs
import pytest
from tests.vocabularies.real import CASES, TEXTS, pushed

from triolet.core import Vocabulary
from triolet.errors import OutputError
from triolet.output.detokenizer import MAX_UNFINISHED, Detokenizer

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SOUPS, SOUP_IDS = 200, 40
PROMPTS = ["a", "Hello", "two words ", "a line\n", "é", "😀", "  "]


def cases(subject):
    """Ids, and their text by the policy for bytes, or None where the library's is meant."""
    for case in CASES[subject.name]:
        yield case["ids"], case.get("final_bytewise"), case.get("final", TEXTS.get(case["s"]))


def soups(subject):
    """Ids that no model would say: all kinds, those without a whole character more often."""
    choose = random.Random(f"soup of {subject.name}")
    everything = subject.ids
    parts = [i for i in everything if subject.is_part_of_a_character(i)]
    special = sorted(subject.vocabulary.special_ids)
    kinds = [everything, everything, parts, special]
    for _ in range(SOUPS):
        yield [choose.choice(choose.choice(kinds)) for _ in range(SOUP_IDS)]


def whole_characters(data, final):
    """As much of ``final`` as these bytes make certain, where they begin it."""
    return data.decode(errors="ignore") if final.encode().startswith(data) else None


def with_decode(subject):
    """The vocabulary as if nothing was known of its bytes."""
    return attrs.evolve(
        subject.vocabulary,
        decode=lambda ids: subject.tokenizer.decode(ids, skip_special_tokens=False),
    )


def test_the_fixture_is_of_this_tokenizer(subject):
    for ids, _, final in cases(subject):
        assert subject.tokenizer.decode(ids, skip_special_tokens=False) == final


def test_each_token_alone_adds_what_the_library_adds(subject):
    ids, anchor = subject.ids, subject.anchor
    decoded = subject.tokenizer.decode_batch(
        [[anchor, token_id] for token_id in ids], skip_special_tokens=False
    )
    wrong = {
        token_id: (text[1:], shown)
        for token_id, text in zip(ids, decoded, strict=True)
        if text[1:] != (shown := "".join(pushed(subject.vocabulary, [token_id], skip=False)))
    }

    assert wrong == {}


@pytest.mark.parametrize("skip", [True, False])
def test_texts_and_byte_sequences_are_what_the_library_decodes(subject, skip):
    for ids, bytewise, _ in cases(subject):
        shown = "".join(pushed(subject.vocabulary, ids, skip=skip, prompt=[subject.anchor]))
        assert shown == subject.expected(ids, skip=skip)
        if "\ufffd" not in shown or not subject.byte_fallback:
            assert shown == subject.added([subject.anchor], ids, skip=skip)
        if bytewise is not None:  # written down as the beginning of a text
            special = min(subject.vocabulary.special_ids)
            begun = pushed(subject.vocabulary, ids, skip=True, prompt=[special])
            assert "".join(begun) == bytewise


def test_each_character_appears_with_its_last_byte(subject):
    # At the beginning of a text, which is where the library decoded them.
    vocabulary, special = subject.vocabulary, min(subject.vocabulary.special_ids)
    checked = 0
    for ids, _, final in cases(subject):
        if vocabulary.special_ids.intersection(ids):
            continue
        deltas = pushed(vocabulary, ids, skip=True, prompt=[special])
        data = b""
        for count, token_id in enumerate(ids, 1):
            data += vocabulary.token_bytes[token_id]
            begun = data[vocabulary.leading_spaces :] if data.startswith(b" ") else data
            certain = whole_characters(begun, final)
            if certain is not None:
                assert "".join(deltas[:count]) == certain
                checked += 1
    assert checked > 300


@pytest.mark.parametrize("skip", [True, False])
def test_output_is_what_it_adds_to_the_prompt(subject, skip):
    if subject.loaded is None:
        prompts = [case[0] for case in [*cases(subject)][:6]]
    else:
        prompts = [subject.encode(text) for text in PROMPTS]
        prompts += [subject.tokenizer.encode(text).ids for text in ("", "Hello")]
    prompts += [[index] for index in sorted(subject.vocabulary.special_ids)[:3]]
    checked = set()
    for prompt in filter(None, prompts):
        for ids, *_ in cases(subject):
            added = subject.added(prompt, ids, skip=skip)
            if added is not None and not ("\ufffd" in added and subject.byte_fallback):
                shown = "".join(pushed(subject.vocabulary, ids, skip=skip, prompt=prompt))
                assert shown == added, prompt
                checked.add((*prompt,))
    assert len(checked) >= 9


def test_a_prompt_that_ends_inside_a_character_never_leaks(subject):
    inside = 0
    for ids, *_ in cases(subject):
        for cut in range(1, len(ids)):
            prompt, output = ids[:cut], ids[cut:]
            shown = "".join(pushed(subject.vocabulary, output, skip=False, prompt=prompt))
            assert shown == subject.expected(output, skip=False)
            inside += subject.added(prompt, output, skip=False) is None
    assert inside


@pytest.mark.parametrize("skip", [True, False])
def test_a_special_token_anywhere_is_shown_or_leaves_no_trace(subject, skip):
    special = random.Random(0).choice(sorted(subject.vocabulary.special_ids))
    spelling = subject.tokenizer.id_to_token(special)
    for ids, *_ in cases(subject):
        if special in ids:
            continue
        plain = "".join(pushed(subject.vocabulary, ids, skip=skip))
        for place in range(len(ids) + 1):
            mixed = [*ids[:place], special, *ids[place:]]
            shown = "".join(pushed(subject.vocabulary, mixed, skip=skip))
            assert shown == plain if skip else spelling in shown
            assert shown == subject.expected(mixed, skip=skip)


@pytest.mark.parametrize("skip", [True, False])
def test_random_ids_are_what_the_library_decodes(subject, skip):
    for ids in soups(subject):
        deltas = pushed(subject.vocabulary, ids, skip=skip, prompt=[subject.anchor])
        assert "".join(deltas) == subject.expected(ids, skip=skip)
        if not subject.byte_fallback:
            assert "".join(deltas) == subject.added([subject.anchor], ids, skip=skip)
        assert len(deltas[-1]) <= 1


def test_the_window_agrees_where_bytes_are_known(subject):
    vocabulary = with_decode(subject)
    for prompt in ([subject.anchor], [subject.anchor] * 20):
        for ids, *_ in cases(subject):
            added = subject.added(prompt, ids, skip=False)
            if not ("\ufffd" in added and subject.byte_fallback):
                deltas = pushed(vocabulary, ids, skip=False, prompt=prompt)
                assert "".join(deltas) == added
                assert len(deltas[-1]) <= MAX_UNFINISHED


def test_the_window_never_raises_and_is_exact_without_byte_tokens(subject):
    vocabulary = with_decode(subject)
    for ids in soups(subject):
        shown = "".join(pushed(vocabulary, ids, skip=True, prompt=[subject.anchor]))
        if not subject.byte_fallback:
            assert shown == subject.expected(ids, skip=True)


def test_padding_of_the_logits_is_an_error_and_disturbs_nothing(subject):
    table = [*subject.vocabulary.token_bytes, None, None]
    vocabulary = Vocabulary(table, subject.vocabulary.special_ids)
    ids = CASES[subject.name][3]["ids"]
    detokenizer = Detokenizer(vocabulary)

    shown = ""
    for token_id in ids:
        for padding in (len(table) - 1, len(table) - 2, len(table)):
            with pytest.raises(OutputError, match=str(padding)):
                detokenizer.push(padding)
        shown += detokenizer.push(token_id)

    assert shown + detokenizer.finish() == subject.expected(ids, skip=True)
