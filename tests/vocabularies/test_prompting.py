"""Texts and chats of real models to ids, and back."""

from __future__ import annotations

import pytest
from tests.vocabularies.real import CASES, TEXTS, pushed

from triolet.errors import InvalidRequestError

pytestmark = [pytest.mark.torch, pytest.mark.slow]

#: What ends a turn, where there is a template.
TURN_END = {
    "smollm2": "<|im_end|>\n",
    "llama3_1": "<|eot_id|>",
    "qwen3": "<|im_end|>\n",
    "gemma3": "<end_of_turn>\n",
}
CHAT = [
    {"role": "user", "content": "Say 👩‍👧 in French."},
    {"role": "assistant", "content": "Une mère et  sa"},
]


@pytest.fixture
def tokenizer(subject):
    if subject.loaded is None:
        pytest.skip("converted to decode only")
    return subject.loaded


def test_ids_are_those_of_the_library(subject, tokenizer):
    for case in CASES[subject.name]:
        if case["s"] in TEXTS:
            assert tokenizer.encode(TEXTS[case["s"]], add_special_tokens=False) == case["ids"]
        text = case.get("final", TEXTS.get(case["s"]))
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == text


def test_a_chat_goes_to_ids_and_back(subject, tokenizer):
    if subject.name not in TURN_END:
        with pytest.raises(InvalidRequestError, match="no chat template"):
            tokenizer.render_chat(CHAT)
        return
    closed = tokenizer.render_chat(CHAT, add_generation_prompt=False)
    asking = tokenizer.render_chat(CHAT[:1])
    going_on = tokenizer.render_chat(CHAT, add_generation_prompt=False, continue_final_message=True)

    assert closed == going_on + TURN_END[subject.name]
    assert going_on.startswith(asking)  # Qwen 3 puts an empty thought in between
    assert going_on.endswith(CHAT[-1]["content"])
    ids = tokenizer.encode(closed, add_special_tokens=False)
    assert "".join(pushed(tokenizer.vocabulary, ids, skip=False)) == closed


def test_the_spelling_of_each_token_leads_back_to_its_id(subject, tokenizer):
    spelled = {tokenizer.token_text(token_id): token_id for token_id in subject.ids}

    assert subject.tokenizer.get_vocab(with_added_tokens=True) == spelled
