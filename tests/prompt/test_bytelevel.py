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
