from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from triolet.errors import UnsupportedModelError
from triolet.prompt.vocabulary import build_vocabulary, byte_alphabet

pytestmark = pytest.mark.torch  # the tokenizers library comes with that extra

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("Ã", "©")]


def byte_level():
    """All 256 bytes, a few merges, and added tokens of both kinds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(left + right for left, right in MERGES)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([
        AddedToken("<|end|>", special=True, normalized=False),
        AddedToken("<think>", special=False, normalized=False),
        AddedToken("<\uff5c▁\uff5c>", special=True, normalized=False),
    ])
    return tokenizer


def sentencepiece(*, strip=False):
    """Bytes as ``<0xNN>``, a few pieces, and the decoder of Gemma or, with ``strip``, Llama 2."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"helo", "é"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "▁")]
    pieces += [left + right for left, right in merges]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] * strip)])
    tokenizer.add_tokens([AddedToken("<s>", special=True, normalized=False)])
    return tokenizer


BYTE_LEVEL, SENTENCEPIECE, STRIPPING = byte_level(), sentencepiece(), sentencepiece(strip=True)
BYTE_LEVEL_TABLE = build_vocabulary(BYTE_LEVEL)
SENTENCEPIECE_TABLE = build_vocabulary(SENTENCEPIECE)
STRIPPING_TABLE = build_vocabulary(STRIPPING)
TEXTS = st.lists(
    st.one_of(
        st.text(),
        st.sampled_from([" hello", "hello  ", "é", "👩‍👧", "�", "<|end|>", "<think>", "<s>"]),
    )
).map("".join)


def joined(vocabulary, ids):
    return b"".join(vocabulary.token_bytes[token] for token in ids).decode(errors="replace")


@given(TEXTS)
def test_byte_level_bytes_are_what_the_library_decodes(text):
    ids = BYTE_LEVEL.encode(text).ids

    assert joined(BYTE_LEVEL_TABLE, ids) == text
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == text


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1)))
def test_byte_level_ids_in_any_order_are_what_the_library_decodes(ids):
    assert joined(BYTE_LEVEL_TABLE, ids) == BYTE_LEVEL.decode(ids, skip_special_tokens=False)


@given(TEXTS)
def test_sentencepiece_bytes_are_what_the_library_decodes(text):
    ids = SENTENCEPIECE.encode(text).ids

    assert joined(SENTENCEPIECE_TABLE, ids) == SENTENCEPIECE.decode(ids, skip_special_tokens=False)


@given(TEXTS)
def test_a_strip_of_the_first_space_does_not_matter_after_a_prompt(text):
    prompt, ids = STRIPPING.encode("h").ids, STRIPPING.encode(text).ids

    assert "h" + joined(STRIPPING_TABLE, ids) == STRIPPING.decode(
        prompt + ids, skip_special_tokens=False
    )


def test_the_alphabet_is_the_librarys():
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_only_special_tokens_are_left_out_of_the_text():
    named = {BYTE_LEVEL.id_to_token(token) for token in BYTE_LEVEL_TABLE.special_ids}

    assert named == {"<|end|>", "<\uff5c▁\uff5c>"}


def test_the_table_is_as_wide_as_the_logits():
    size = BYTE_LEVEL.get_vocab_size()

    wide, narrow = build_vocabulary(BYTE_LEVEL, size + 5), build_vocabulary(BYTE_LEVEL, 256)

    assert len(BYTE_LEVEL_TABLE) == size
    assert len(wide) == size + 5
    assert wide.token_bytes[size:] == [None] * 5
    assert (len(narrow), narrow.special_ids) == (256, frozenset())


def test_an_added_token_in_latin_letters_stays_legible():
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("Müé", special=False, normalized=False)])

    vocabulary = build_vocabulary(tokenizer)

    assert vocabulary.token_bytes[tokenizer.token_to_id("Müé")] == "Müé".encode()


def test_a_metaspace_decoder_restores_spaces():
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0)], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()

    assert build_vocabulary(tokenizer).token_bytes == [b"<unk>", b" a"]


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (None, "spaces"),
        (decoders.WordPiece(), "WordPiece"),
        (decoders.CTC(), "CTC"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]), "Strip"),
        (
            decoders.Sequence([
                decoders.Replace("▁", " "),
                decoders.Fuse(),
                decoders.Strip(" ", 0, 1),
            ]),
            "Strip",
        ),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]), "Replace"),
        (decoders.Sequence([decoders.Replace(Regex("▁"), " "), decoders.Fuse()]), "Replace"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), "ByteLevel"),
    ],
)
def test_a_decoder_that_looks_across_tokens_is_refused(decoder, name):
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder

    with pytest.raises(UnsupportedModelError, match=name):
        build_vocabulary(tokenizer)
