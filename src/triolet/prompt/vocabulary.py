"""The bytes of each token id, worked out from a tokenizer's decoder.

A tokenizer's decoder is a function of the whole sequence. For two families it is a sum over its
tokens, and then the detokenizer needs only a table:

- byte-level BPE writes each byte as one printable character (GPT-2's alphabet);
- SentencePiece writes a space as U+2581 and, with byte fallback, a stray byte as ``<0xNN>``. Some
  of its decoders take a space off the very start of a text, which the detokenizer is told.

For any other decoder (WordPiece, CTC, a suffix for the end of a word, a strip of each token, a
pattern) a table would be silently wrong: the detokenizer gets the library's decoder itself.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs

from triolet.core import Vocabulary
from triolet.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tokenizers import Tokenizer

    from triolet.errors import TrioletError

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
    """What the detokenizer needs of a tokenizer: a byte table or, failing that, its decoder.

    Added tokens of a byte-level tokenizer are their literal text. (The library sends them through
    the byte alphabet too, which makes mojibake of an added ``é``.)

    Args:
        tokenizer: A tokenizer of the ``tokenizers`` library.
        vocab_size: Ids of the table: the width of the model's logits, which is often larger
            than the tokenizer's count. Where absent, one more than the largest id.
    """
    if vocab_size is None:
        vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    added = tokenizer.get_added_tokens_decoder()
    spec = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None
    steps = _flatten(spec)
    byte_level = [step["type"] for step in steps] == ["ByteLevel"]
    pieces = None if byte_level else _sentencepiece(steps)
    to_bytes = _byte_level() if byte_level else pieces.to_bytes if pieces else str.encode
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
    return Vocabulary(
        token_bytes,
        special,
        leading_spaces=pieces.leading_spaces if pieces else 0,
        decode=None if byte_level or pieces else partial(_decode, tokenizer),
    )


@contextmanager
def library_errors_as(failure: TrioletError) -> Iterator[None]:
    """Raise ``failure`` for whatever the tokenizers library raises within.

    That may be a panic of its Rust code, which is no :class:`Exception`: left alone, it would
    pass every handler of a request's own errors and end the server.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # its class cannot be imported
        if isinstance(error, Exception) or is_panic:
            raise failure from error  # noqa: ASYNC104 - neither is a cancellation
        raise


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    failure = OutputError("The tokenizer of this model failed to decode its output.")
    with library_errors_as(failure):
        return str(tokenizer.decode(ids, skip_special_tokens=False))


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


@attrs.frozen
class _Pieces:
    """A SentencePiece decoder, as the function of one token that it is."""

    #: What to replace in a token, and by what; in order.
    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool
    #: Spaces taken off the start of a text.
    leading_spaces: int

    def to_bytes(self, token: str) -> bytes:
        for old, new in self.replacements:
            token = token.replace(old, new)
        found = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return bytes.fromhex(found[1]) if found else token.encode()


def _sentencepiece(steps: list[dict[str, object]]) -> _Pieces | None:
    """The decoder as a sum over tokens; ``None`` if it looks across them."""
    replacements: list[tuple[str, str]] = []
    byte_fallback = False
    fused = False
    leading_spaces = 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                not fused and not byte_fallback
            ):
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)} if not fused and not byte_fallback:
                replacements.append((old, " "))
                # Of the first token, the library takes off all: one, in vocabularies that are
                # trained, as their words begin with one.
                leading_spaces = int(step.get("prepend_scheme", "always") != "never")
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                leading_spaces += start
            case _:
                return None
    return _Pieces(tuple(replacements), byte_fallback, leading_spaces) if replacements else None
