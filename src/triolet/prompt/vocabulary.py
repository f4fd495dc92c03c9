"""The bytes of each token id, worked out from a tokenizer's decoder.

A tokenizer's decoder is a function of the whole sequence. For the two families that serve
today it is a sum over its tokens, and then the detokenizer needs only a table:

- byte-level BPE writes each byte as one printable character (GPT-2's alphabet);
- SentencePiece with byte fallback writes a space as U+2581 and a stray byte as ``<0xNN>``.

A decoder that looks across tokens is refused: a table would be silently wrong for it. The one
exception is a strip of leading spaces at the very start of the text, which never matters here,
because output always follows a prompt.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from triolet.core import Vocabulary
from triolet.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tokenizers import Tokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character of each byte, as character to byte.

    Printable Latin-1 stands for itself; the 68 others follow from U+0100 on, in order (Radford
    et al., "Language Models are Unsupervised Multitask Learners", 2019, and its code).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


def build_vocabulary(tokenizer: Tokenizer, vocab_size: int | None = None) -> Vocabulary:
    """The byte table of a tokenizer.

    Added tokens of a byte-level tokenizer are their literal text. (The library sends them through
    the byte alphabet too, which makes mojibake of an added ``é``.)

    Args:
        tokenizer: A tokenizer of the ``tokenizers`` library.
        vocab_size: Ids of the table: the width of the model's logits, which is often larger
            than the tokenizer's count. Where absent, one more than the largest id.

    Raises:
        UnsupportedModelError: The decoder is not a sum over tokens.
    """
    if vocab_size is None:
        vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    added = tokenizer.get_added_tokens_decoder()
    spec = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None
    steps = _flatten(spec)
    byte_level = [step["type"] for step in steps] == ["ByteLevel"]
    to_bytes = _byte_level() if byte_level else _sentencepiece(steps)
    token_bytes: list[bytes | None] = []
    for index in range(vocab_size):
        token = tokenizer.id_to_token(index)
        if token is None:
            token_bytes.append(None)
        elif byte_level and index in added:
            token_bytes.append(token.encode())
        else:
            token_bytes.append(to_bytes(token))
    special = frozenset(
        index for index, token in added.items() if token.special and index < vocab_size
    )
    return Vocabulary(token_bytes, special)


def _flatten(spec: Mapping[str, object] | None) -> list[dict[str, object]]:
    """The steps of a decoder, sequences unrolled."""
    if spec is None:
        return []
    nested = spec.get("decoders")
    if spec["type"] == "Sequence" and isinstance(nested, list):
        return [step for part in nested for step in _flatten(part)]
    return [dict(spec)]


def _byte_level() -> Callable[[str], bytes]:
    alphabet = byte_alphabet()

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([alphabet[character] for character in token])
        except KeyError:
            return token.encode()  # as the library does: not written in the alphabet, so literal

    return to_bytes


def _sentencepiece(steps: list[dict[str, object]]) -> Callable[[str], bytes]:
    replacements: list[tuple[str, str]] = []
    byte_fallback = False
    fused = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                not fused and not byte_fallback
            ):
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)} if not fused:
                replacements.append((old, " "))
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "stop": 0} if fused:
                pass
            case _:
                raise _unsupported(str(step["type"]))
    if not replacements:
        raise _unsupported("none that restores spaces")

    def to_bytes(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        found = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
        return bytes.fromhex(found[1]) if found else token.encode()

    return to_bytes


def _unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The tokenizer of this model has a decoder ({what}) that cannot be streamed byte by byte;"
        " byte-level BPE and SentencePiece tokenizers can."
    )
