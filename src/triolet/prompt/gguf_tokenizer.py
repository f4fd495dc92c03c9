"""Builds a tokenizer from the ``tokenizer.ggml.*`` metadata of a GGUF file.

Direct construction, because the detours are slow or wrong: transformers takes seconds, and
ignores ``tokenizer.ggml.pre``, the name of the rule that cuts text before the merges. A wrong
rule gives wrong ids without any error, so a name that is not in the table below is refused.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

import attrs
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from triolet.errors import ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: What to do about a tokenizer that cannot be built from the file.
REMEDY: Final = "put the model's tokenizer.json beside the file, and it is used instead"


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``, as llama.cpp numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@attrs.frozen
class PreTokenizer:
    """How text is cut before merging. One of ``pattern`` and ``digits`` may be set."""

    #: A regular expression whose matches are the pieces; GPT-2's own where absent.
    pattern: str | None = None
    #: Each digit is a piece of its own, before GPT-2's pattern sees it.
    digits: bool = False
    normalize_nfc: bool = False
    #: A piece that is itself a token is not merged.
    ignore_merges: bool = False
    #: Whether a beginning-of-sequence token is added where the file does not say.
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The library's object for this rule."""
        if self.pattern is not None:
            return pre_tokenizers.Sequence([
                pre_tokenizers.Split(Regex(self.pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ])
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if self.digits:
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
        return gpt2


_TIKTOKEN_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: By ``tokenizer.ggml.pre``. The two with a pattern were compared with the tokenizer.json of
#: Llama 3.1 and Qwen3, ids for ids; "gpt-2" is the library's own default.
PRE_TOKENIZERS: Final = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "llama-bpe": PreTokenizer(
        pattern=_TIKTOKEN_PATTERN % r"\p{N}{1,3}", ignore_merges=True, add_bos=True
    ),
    "qwen2": PreTokenizer(pattern=_TIKTOKEN_PATTERN % r"\p{N}", normalize_nfc=True),
}


def build_gguf_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    Args:
        metadata: The file's metadata; arrays are lists.

    Raises:
        UnsupportedModelError: The tokenizer is of a kind that would give wrong ids.
        ModelLoadError: The description contradicts itself.
    """
    pre = _pre_tokenizer(metadata)
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise _broken("it lists a token twice")
    merges: list[tuple[str, str]] = []
    for merge in _strings(metadata, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not space:
            raise _broken("it has a merge of one part")
        merges.append((left, right))
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises nothing narrower
        raise _broken(str(error)) from error
    tokenizer = Tokenizer(model)
    if pre.normalize_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, metadata)
    _add_ends(tokenizer, tokens, metadata, add_bos=pre.add_bos)
    return tokenizer


def gguf_special_tokens(metadata: Mapping[str, object]) -> dict[str, str]:
    """The named special tokens of a GGUF file, under the names chat templates use."""
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    found = {}
    for key, name in names.items():
        index = _token_id(metadata, key, len(tokens))
        if index is not None:
            found[f"{name}_token"] = tokens[index]
    return found


def _pre_tokenizer(metadata: Mapping[str, object]) -> PreTokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise _broken("it has none")
    if model != "gpt2":
        raise UnsupportedModelError(
            f"GGUF tokenizers of the kind {str(model)!r} are not built from the file; {REMEDY}."
        )
    name = metadata.get("tokenizer.ggml.pre")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedModelError(
            f"The GGUF file cuts text by the rule {name!r}, and only {known} are known;"
            f" a guess would give wrong token ids. To go on, {REMEDY}."
        )
    return pre


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], metadata: Mapping[str, object]) -> None:
    """Register what is found in text before any cutting: control and user-defined tokens."""
    types = metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list) or len(types) not in {0, len(tokens)}:
        raise _broken("its token types do not match its tokens")
    special = {TokenType.CONTROL, TokenType.UNKNOWN}
    tokenizer.add_tokens([
        AddedToken(token, special=kind in special, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in special or kind == TokenType.USER_DEFINED
    ])


def _add_ends(
    tokenizer: Tokenizer,
    tokens: list[str],
    metadata: Mapping[str, object],
    *,
    add_bos: bool,
) -> None:
    bos = _token_id(metadata, "bos", len(tokens))
    eos = _token_id(metadata, "eos", len(tokens))
    template: list[str] = ["$A"]
    used: dict[str, int] = {}
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", add_bos) is True:
        template.insert(0, tokens[bos])
        used[tokens[bos]] = bos
    if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False) is True:
        template.append(tokens[eos])
        used[tokens[eos]] = eos
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=list(used.items())
        )


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise _broken(f"it has no {key}")
    return values


def _token_id(metadata: Mapping[str, object], name: str, count: int) -> int | None:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < count:
        raise _broken(f"its {name} token lies outside its vocabulary")
    return index


def _broken(what: str) -> ModelLoadError:
    return ModelLoadError(f"The tokenizer of the GGUF file is damaged: {what}.")
