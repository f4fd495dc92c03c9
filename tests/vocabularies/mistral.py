"""Mistral's two kinds of vocabulary as tokenizers, to decode with.

Only ids to text: merges are left out, so encoding would be wrong.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models

from triolet.prompt.vocabulary import byte_alphabet

if TYPE_CHECKING:
    from pathlib import Path

#: Types of a piece, as sentencepiece's model numbers them.
NORMAL, UNKNOWN, CONTROL = 1, 2, 3


def sentencepiece_tokenizer(path: Path) -> Tokenizer:
    """From a ``.model`` file of sentencepiece, with the decoder that its models are used with."""
    pieces = [*_pieces(path.read_bytes())]
    tokenizer = _tokenizer([piece for piece, _ in pieces])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])
    _mark_special(tokenizer, [piece for piece, kind in pieces if kind in {UNKNOWN, CONTROL}])
    return tokenizer


def tekken_tokenizer(path: Path) -> Tokenizer:
    """From a ``tekken.json``: special tokens first, then bytes by rank."""
    data = json.loads(path.read_bytes())
    config = data["config"]
    count = config["default_num_special_tokens"]
    special = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{index}>" for index in range(3, count))]
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    tokens = [
        "".join(letters[byte] for byte in base64.b64decode(entry["token_bytes"]))
        for entry in data["vocab"][: config["default_vocab_size"] - count]
    ]
    tokenizer = _tokenizer(special + tokens)
    tokenizer.decoder = decoders.ByteLevel()
    _mark_special(tokenizer, special)
    return tokenizer


def _tokenizer(tokens: list[str]) -> Tokenizer:
    return Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))


def _mark_special(tokenizer: Tokenizer, tokens: list[str]) -> None:
    tokenizer.add_special_tokens([
        AddedToken(token, special=True, normalized=False) for token in tokens
    ])


def _pieces(data: bytes):
    """Text and type of each piece: field 1 of the message, whose fields 1 and 3 they are."""
    for field, piece in _fields(data):
        if field == 1:
            parts = dict(_fields(piece))
            yield parts[1].decode(), parts.get(3, NORMAL)


def _fields(data: bytes):
    """Number and value of each field of a protocol buffers message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        match key & 7:
            case 0:
                value, at = _varint(data, at)
            case 2:
                size, at = _varint(data, at)
                value, at = data[at : at + size], at + size
            case wire:
                size = {1: 8, 5: 4}[wire]
                value, at = data[at : at + size], at + size
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
