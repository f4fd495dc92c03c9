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

from triolet.errors import OutputError
from triolet.output.detokenizer import Detokenizer
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
@pytest.mark.slow
def test_byte_level_bytes_are_what_the_library_decodes(text):
    ids = BYTE_LEVEL.encode(text).ids

    assert joined(BYTE_LEVEL_TABLE, ids) == text
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == text


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1)))
def test_byte_level_ids_in_any_order_are_what_the_library_decodes(ids):
    assert joined(BYTE_LEVEL_TABLE, ids) == BYTE_LEVEL.decode(ids, skip_special_tokens=False)


@given(TEXTS)
@pytest.mark.slow
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


def test_a_token_outside_the_alphabet_is_literal_as_in_the_library():
    tokenizer = Tokenizer(models.BPE(vocab={"Ġa": 0, "▁é": 1}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()

    assert build_vocabulary(tokenizer).token_bytes == [b" a", "▁é".encode()]
    assert tokenizer.decode([0, 1]) == " a▁é"


@pytest.mark.parametrize("scheme", ["always", "never"])
def test_a_metaspace_decoder_restores_spaces(scheme):
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0)], unk_id=0))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens(["<s>"])
    vocabulary = build_vocabulary(tokenizer)

    assert vocabulary.token_bytes == [b"<unk>", b" a", b"<s>"]
    begun = Detokenizer(vocabulary, prompt_ids=(2,))
    assert begun.push(1) + begun.push(1) == tokenizer.decode([1, 1])
    gone_on = Detokenizer(vocabulary, prompt_ids=(1,))
    assert gone_on.push(1) == " a"


def test_how_many_spaces_a_text_loses_at_its_start_is_known():
    assert STRIPPING_TABLE.leading_spaces == 1
    assert SENTENCEPIECE_TABLE.leading_spaces == BYTE_LEVEL_TABLE.leading_spaces == 0


WORDS = ["a", "##b", ".", "n't", "é</w>", "c</w>", "▁d", "▁", "|", "<0xE2>", "Ġe", "Ã", "©", "''"]
REPLACE, FUSE = decoders.Replace("▁", " "), decoders.Fuse()
DECODERS = {
    "none": None,
    "WordPiece": decoders.WordPiece(),
    "WordPiece without clean-up": decoders.WordPiece(cleanup=False),
    "CTC": decoders.CTC(),
    "BPEDecoder": decoders.BPEDecoder(),
    "no replacement": FUSE,
    "strip of each token": decoders.Sequence([REPLACE, decoders.Strip(" ", 1, 0)]),
    "strip of a letter": decoders.Sequence([REPLACE, FUSE, decoders.Strip("a", 1, 0)]),
    "replacement across tokens": decoders.Sequence([FUSE, REPLACE]),
    "replacement after bytes": decoders.Sequence([decoders.ByteFallback(), REPLACE]),
    "space after bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "bytes across tokens": decoders.Sequence([REPLACE, FUSE, decoders.ByteFallback()]),
    "pattern": decoders.Sequence([decoders.Replace(Regex("▁"), " "), FUSE]),
    "byte level and more": decoders.Sequence([decoders.ByteLevel(), FUSE]),
}


def across(decoder):
    vocab = {token: index for index, token in enumerate([*WORDS, "<pad>", "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


LOOKING_ACROSS = {name: across(decoder) for name, decoder in DECODERS.items()}
#: Panics on an empty text, as its source in the library shows.
STRIP_OF_THE_END = decoders.Sequence([REPLACE, FUSE, decoders.Strip(" ", 0, 1)])
IDS = st.lists(st.integers(0, len(WORDS) + 2), max_size=40)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
@given(prompt=IDS, ids=IDS, skip=st.booleans())
def test_a_decoder_that_looks_across_tokens_is_asked_itself(name, prompt, ids, skip):
    tokenizer = LOOKING_ACROSS[name]
    vocabulary = build_vocabulary(tokenizer)
    assert vocabulary.decode is not None
    detokenizer = Detokenizer(vocabulary, skip, prompt)

    shown = "".join([*(detokenizer.push(i) for i in ids), detokenizer.finish()])

    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    full = tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
    if full.startswith(before):  # else the prompt ended inside a character, or with its strip
        assert before + shown == full


@pytest.mark.parametrize("name", DECODERS)
def test_a_token_without_bytes_of_its_own_is_spelled_as_in_the_vocabulary(name):
    vocabulary = build_vocabulary(LOOKING_ACROSS[name], len(WORDS) + 5)

    spelled = (*WORDS, "<pad>", "<unk>", "<s>")
    assert vocabulary.token_bytes == [*map(str.encode, spelled), None, None]
    assert vocabulary.special_ids == {len(WORDS) + 1, len(WORDS) + 2}


def test_a_panic_of_the_library_is_one_requests_failure():
    vocabulary = build_vocabulary(across(STRIP_OF_THE_END))
    detokenizer = Detokenizer(vocabulary, prompt_ids=(0,))
    assert detokenizer.push(0) == "a"

    with pytest.raises(OutputError, match="failed to decode"):
        vocabulary.decode([])
