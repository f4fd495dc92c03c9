from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.errors import InvalidRequestError
from triolet.prompt.bytelevel import (
    BYTE_BOS_ID,
    BYTE_EOS_ID,
    BYTE_VOCAB_SIZE,
    SPECIAL_TOKENS,
    ByteTokenizer,
)

TOKENIZER = ByteTokenizer()
TEXTS = st.lists(st.one_of(st.text(), st.sampled_from([*SPECIAL_TOKENS, "<|", "|>", "<|bos"])))


@pytest.mark.slow
@given(parts=TEXTS, add_special_tokens=st.booleans())
def test_the_bytes_of_the_ids_are_the_text(parts, add_special_tokens):
    text = "".join(parts)

    ids = TOKENIZER.encode(text, add_special_tokens=add_special_tokens)

    joined = b"".join(TOKENIZER.vocabulary.token_bytes[token] for token in ids)
    assert joined.decode() == ("<|bos|>" if add_special_tokens else "") + text


@given(st.text())
def test_plain_text_is_its_utf8(text):
    if "<|" not in text:
        assert TOKENIZER.encode(text, add_special_tokens=False) == list(text.encode())


def test_special_tokens_in_text_are_single_ids():
    assert TOKENIZER.encode("a<|eos|>b<|user|>", add_special_tokens=False) == [97, 257, 98, 258]
    assert TOKENIZER.encode("a", add_special_tokens=True) == [BYTE_BOS_ID, 97]


def test_the_constants_fit_the_vocabulary():
    vocabulary = TOKENIZER.vocabulary

    assert len(vocabulary) == BYTE_VOCAB_SIZE == 262
    assert vocabulary.token_bytes[BYTE_EOS_ID] == b"<|eos|>"
    assert vocabulary.special_ids == set(range(256, 262))


def test_a_chat_is_rendered_plainly():
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "Hi ☃"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "42"},
    ]

    assert TOKENIZER.has_chat_template
    assert TOKENIZER.render_chat(messages) == (
        "<|bos|><|system|>Be short.<|end|><|user|>Hi ☃<|end|><|assistant|><|end|>"
        "<|user|>42<|end|><|assistant|>"
    )


@pytest.mark.parametrize(
    "message",
    [{"role": "wizard", "content": ""}, {"content": ""}, {"role": [], "content": ""}],
)
def test_an_unknown_role_is_the_messages_fault(message):
    with pytest.raises(InvalidRequestError, match="role") as caught:
        TOKENIZER.render_chat([message])

    assert caught.value.param == "messages"


def test_content_that_is_not_text_is_the_messages_fault():
    with pytest.raises(InvalidRequestError, match="content") as caught:
        TOKENIZER.render_chat([{"role": "user", "content": [{"type": "text"}]}])

    assert caught.value.param == "messages"


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(InvalidRequestError, match="surrogate"):
        TOKENIZER.encode("a\ud83d", add_special_tokens=False)


@given(st.lists(st.integers(0, BYTE_VOCAB_SIZE - 1)), st.booleans())
def test_decoding_is_what_the_vocabulary_says(ids, skip):
    shown = [token for token in ids if not (skip and token in TOKENIZER.vocabulary.special_ids)]
    joined = b"".join(TOKENIZER.vocabulary.token_bytes[token] for token in shown)

    assert TOKENIZER.decode(ids, skip_special_tokens=skip) == joined.decode(errors="replace")


def test_tokens_are_spelled_for_people():
    spelled = [TOKENIZER.token_text(token) for token in (97, 32, 10, 0xE9, 256, 261)]

    assert spelled == ["a", " ", "<0x0A>", "<0xE9>", "<|bos|>", "<|end|>"]
    assert len({TOKENIZER.token_text(token) for token in range(BYTE_VOCAB_SIZE)}) == BYTE_VOCAB_SIZE


@pytest.mark.parametrize("token", [-1, BYTE_VOCAB_SIZE, 10**20])
def test_an_id_outside_the_vocabulary_is_refused(token):
    with pytest.raises(InvalidRequestError, match=str(token)):
        TOKENIZER.token_text(token)
    with pytest.raises(InvalidRequestError, match=str(token)):
        TOKENIZER.decode([97, token], skip_special_tokens=False)


ASKED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, "}]


def test_the_turn_of_the_assistant_can_be_left_to_the_model_or_be_gone_on_with():
    both = "<|bos|><|user|>Hi<|end|><|assistant|>Hello, "

    assert TOKENIZER.render_chat(ASKED, add_generation_prompt=False) == both + "<|end|>"
    assert (
        TOKENIZER.render_chat(ASKED, add_generation_prompt=False, continue_final_message=True)
        == both
    )
    assert TOKENIZER.render_chat(ASKED, template_kwargs={"any": 1}) == both + (
        "<|end|><|assistant|>"
    )


@pytest.mark.parametrize("messages", [[], [{"role": "assistant", "content": None}]])
def test_there_must_be_a_text_to_go_on_with(messages):
    with pytest.raises(InvalidRequestError, match="continued") as caught:
        TOKENIZER.render_chat(messages, add_generation_prompt=False, continue_final_message=True)

    assert caught.value.param == "continue_final_message"


def test_arguments_that_exclude_each_other_or_are_reserved_are_refused():
    with pytest.raises(InvalidRequestError, match="add_generation_prompt to false") as caught:
        TOKENIZER.render_chat(ASKED, continue_final_message=True)
    assert caught.value.param == "continue_final_message"

    with pytest.raises(InvalidRequestError, match="chat_template cannot be set") as caught:
        TOKENIZER.render_chat(ASKED, template_kwargs={"chat_template": "{{ 1 }}"})
    assert caught.value.param == "chat_template_kwargs"
