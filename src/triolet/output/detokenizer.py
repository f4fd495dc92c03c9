"""Token ids to text, on bytes where the vocabulary has them.

Rules:

1. The joined text is what decoding prompt and output adds to decoding the prompt. It is a
   function of the id sequence, and cannot depend on how that was grouped.
2. A character split over k tokens appears whole with the k-th. Only the bytes of an unfinished
   character wait, at most three.
3. A byte that can no longer belong to a character becomes U+FFFD, once per maximal subpart of
   an ill-formed sequence (The Unicode Standard 16.0, section 3.9, "U+FFFD Substitution of
   Maximal Subparts"); :meth:`Detokenizer.finish` treats an unfinished tail in the same way.
   A U+FFFD that the vocabulary spells out is a character like any other, and appears at once.
4. A skipped special token adds no bytes and disturbs none: a character begun before it goes on
   after it, as if the special token had not been there. This is what decoding the whole output
   does, which drops special tokens first.
5. Nothing of the prompt is ever shown, nor completed by the output: decoding starts empty. The
   prompt is asked only whether the output begins the visible text, because some decoders take
   a space off there.

Theory of operation: in most vocabularies each id adds its own bytes, whatever its neighbours,
and one incremental decoder does it all. For the others :attr:`~triolet.core.Vocabulary.decode`
is asked about a window of the last ids, as ``DecodeStream`` of the tokenizers library does, and
what is new in the answer is the delta. Such a window knows text and no bytes, hence three limits:

a. A token's text may depend on :data:`WINDOW_IDS` ids before it, and not on more.
b. A U+FFFD may be an unfinished character, so the last :data:`MAX_UNFINISHED` of them wait.
   The library holds a run of any length, and its tail for ever; here :meth:`Detokenizer.finish`
   shows it.
c. A decoder may take back what it said (the library raises here, and the text is lost). What
   was shown stays shown, and the window starts over with the token that changed it. This also
   keeps rule 5 for a prompt that ends inside a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

import attrs

from triolet.core import Vocabulary
from triolet.errors import OutputError

#: Ids kept as context of the next one; twice as many are decoded at most. Decoders look back by
#: one id (CTC drops repetitions) or by one character; the rest is for runs without text.
WINDOW_IDS: Final = 8
#: U+FFFD that three bytes of an unfinished character of four may be shown as.
MAX_UNFINISHED: Final = 3

_new_decoder = codecs.getincrementaldecoder("utf-8")


@attrs.define(eq=False)
class _ByteText:
    """Text of a vocabulary in which each id has its own bytes."""

    token_bytes: Sequence[bytes | None]
    #: Spaces still to be taken off the start.
    leading_spaces: int
    _decoder: codecs.IncrementalDecoder = attrs.field(
        init=False, factory=lambda: _new_decoder("replace")
    )

    def add(self, token_id: int) -> str:
        data = self.token_bytes[token_id] or b""
        if self.leading_spaces and data:
            rest = data.removeprefix(b" " * min(self.leading_spaces, _spaces(data)))
            self.leading_spaces = 0 if rest else self.leading_spaces - len(data)
            data = rest
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


@attrs.define(eq=False)
class _WindowText:
    """Text of a vocabulary that only decodes whole sequences."""

    decode: Callable[[Sequence[int]], str]
    #: The last ids, oldest first; at first of the prompt.
    ids: list[int]
    #: What of the window's text was shown, or belongs to the prompt.
    shown: str = attrs.field(init=False)

    @shown.default
    def _prompt_text(self) -> str:
        return self.decode(self.ids) if self.ids else ""

    def add(self, token_id: int) -> str:
        self.ids.append(token_id)
        text = self.decode(self.ids)
        if not text.startswith(self.shown):
            self.ids, self.shown = [token_id], ""
            text = self.decode(self.ids)
        certain = max(len(self.shown), len(text) - _unfinished(text))
        delta = text[len(self.shown) : certain]
        self.shown = text[:certain]
        if len(self.ids) >= 2 * WINDOW_IDS:
            self._slide(len(text) - certain)
        return delta

    def _slide(self, held: int) -> None:
        """Forget all but the last ids; so many characters at their end are not shown yet."""
        del self.ids[:-WINDOW_IDS]
        text = self.decode(self.ids)
        self.shown = text[: max(0, len(text) - held)]

    def finish(self) -> str:
        text = self.decode(self.ids) if self.ids else ""
        tail, self.shown = text[len(self.shown) :], text
        return tail


@attrs.define(eq=False)
class Detokenizer:
    """The text of one choice, one token at a time.

    Args:
        vocabulary: What ids mean.
        skip_special_tokens: Leave special tokens out of the text.
        prompt_ids: The ids before the first; only some at the end are looked at. Empty means
            that some visible text came before, and nothing is known of it.
    """

    vocabulary: Vocabulary
    skip_special_tokens: bool = True
    prompt_ids: Sequence[int] = attrs.field(default=(), repr=False)
    _text: _ByteText | _WindowText = attrs.field(init=False, repr=False)

    @_text.default
    def _new_text(self) -> _ByteText | _WindowText:
        vocabulary = self.vocabulary
        skipped = vocabulary.special_ids if self.skip_special_tokens else frozenset[int]()
        visible = (token_id for token_id in reversed(self.prompt_ids) if token_id not in skipped)
        if vocabulary.decode is not None:
            return _WindowText(vocabulary.decode, [*islice(visible, WINDOW_IDS)][::-1])
        begins_text = bool(self.prompt_ids) and next(visible, None) is None
        return _ByteText(vocabulary.token_bytes, vocabulary.leading_spaces if begins_text else 0)

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often a word, sometimes nothing.

        Raises:
            OutputError: The id is outside the vocabulary. Nothing was added.
        """
        vocabulary = self.vocabulary
        if self.skip_special_tokens and token_id in vocabulary.special_ids:
            return ""
        # A negative id would count from the end of the list: wrong text instead of an error.
        known = 0 <= token_id < len(vocabulary.token_bytes)
        if not known or vocabulary.token_bytes[token_id] is None:
            raise OutputError(
                f"The model produced token id {token_id}, which its vocabulary does not have; "
                "the model and its tokenizer do not belong together."
            )
        return self._text.add(token_id)

    def finish(self) -> str:
        """What an unfinished character at the end leaves: U+FFFD, or nothing."""
        return self._text.finish()


def _spaces(data: bytes) -> int:
    """Spaces at the start of ``data``."""
    return len(data) - len(data.lstrip(b" "))


def _unfinished(text: str) -> int:
    """Characters at the end of ``text`` that may be those of an unfinished character."""
    tail = text[-MAX_UNFINISHED:]
    return len(tail) - len(tail.rstrip("\ufffd"))
