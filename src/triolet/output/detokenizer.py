"""Token ids to text, on bytes.

Rules:

1. Each id adds its own bytes, whatever its neighbours (:class:`~triolet.core.Vocabulary`).
   Text is the UTF-8 decoding of all these bytes, so it cannot depend on how they were grouped.
2. A character split over k tokens appears whole with the k-th. Only the bytes of an unfinished
   character wait, at most three.
3. A byte that can no longer belong to a character becomes U+FFFD, once per maximal subpart of
   an ill-formed sequence (The Unicode Standard 16.0, section 3.9, "U+FFFD Substitution of
   Maximal Subparts"); :meth:`Detokenizer.finish` treats an unfinished tail in the same way.
   A U+FFFD that the vocabulary spells out is a character like any other, and appears at once.
4. A skipped special token adds no bytes and disturbs none: a character begun before it goes on
   after it, as if the special token had not been there. This is what decoding the whole output
   does, which drops special tokens first.
5. Decoding starts empty: nothing of the prompt is ever shown, nor completed by the output.
"""

from __future__ import annotations

import codecs

import attrs

from triolet.core import Vocabulary
from triolet.errors import OutputError

_new_decoder = codecs.getincrementaldecoder("utf-8")


@attrs.define(eq=False)
class Detokenizer:
    """The text of one choice, one token at a time."""

    vocabulary: Vocabulary
    skip_special_tokens: bool = True
    _decoder: codecs.IncrementalDecoder = attrs.field(
        init=False, factory=lambda: _new_decoder("replace")
    )

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
        data = vocabulary.token_bytes[token_id] if known else None
        if data is None:
            raise OutputError(
                f"The model produced token id {token_id}, which its vocabulary does not have; "
                "the model and its tokenizer do not belong together."
            )
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What an unfinished character at the end leaves: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)
