r"""Logprobs as clients read them: with the tokens spelled out, and in finite numbers.

Rules:

1. ``data`` are the token's own bytes, those that it adds to the text. So those of a choice's
   tokens, put together and decoded, are its text; where a stop or an end-of-sequence id ended it,
   they go on behind the text, with what was cut off. Two exceptions, where the tokenizer's own
   decoder changes bytes: a space that it takes off the very start of a text, and vocabularies
   with :attr:`~triolet.core.Vocabulary.decode`, whose bytes are only how a token is spelled.
2. A special token that is skipped adds nothing: its ``data`` is ``None``, which OpenAI's reference
   calls "no bytes representation" (``null``), and not empty, which an ordinary token may be. Its
   ``token`` is its literal text all the same.
3. ``token`` is the text of the token's own bytes if they are valid UTF-8 by themselves, else
   ``bytes:`` and each byte as ``\xNN`` in lower case, as OpenAI writes it.
4. An id without bytes (a model's logits are often wider than its vocabulary, so one can be among
   the most likely) is spelled ``token_id:N``, vLLM's way of writing an id, and has no ``data``.
   All tokens are spelled so with ``as_ids``; their ``data`` stay.
5. A logprob is a finite number: what is below :data:`LOWEST_LOGPROB` or not finite becomes it.
"""

from __future__ import annotations

import math
from contextlib import suppress

import attrs

from triolet.core import Vocabulary
from triolet.errors import OutputError
from triolet.output.detokenizer import Detokenizer

#: Stands for "very unlikely": the value that OpenAI's reference gives it, for JSON has no infinity.
LOWEST_LOGPROB = -9999.0


@attrs.frozen
class SpelledToken:
    """A token and how likely it was."""

    token: str
    #: Values of 0 to 255; ``None`` where the token adds nothing to the text.
    data: tuple[int, ...] | None
    #: Natural logarithm, finite.
    logprob: float


@attrs.frozen
class Spelling:
    """How the tokens of one request are spelled; see the rules."""

    vocabulary: Vocabulary
    #: As the text of the request is made.
    skip_special_tokens: bool = True
    #: Write each ``token`` as ``token_id:N``.
    as_ids: bool = False

    def token(self, token_id: int, logprob: float) -> SpelledToken:
        """Spell out one token."""
        vocabulary = self.vocabulary
        known = 0 <= token_id < len(vocabulary.token_bytes)
        data = vocabulary.token_bytes[token_id] if known else None
        skipped = self.skip_special_tokens and token_id in vocabulary.special_ids
        return SpelledToken(
            f"token_id:{token_id}" if data is None or self.as_ids else _spell(data),
            None if data is None or skipped else tuple(data),
            logprob if LOWEST_LOGPROB < logprob < math.inf else LOWEST_LOGPROB,
        )


def _spell(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@attrs.define(eq=False)
class TextOffsets:
    """Where in the text of one choice each of its tokens begins: ``text_offset`` of completions.

    The offset of a token is the number of characters (code points, as in Python) that were certain
    before it, as :class:`~triolet.output.detokenizer.Detokenizer` has it. So the text of a token
    that begins a character begins there; a token that goes on with a character begun before has
    that character's offset, and a character split over k tokens gives all k the same one. A token
    that adds nothing (a skipped special token, an id without bytes) has the offset of the next.

    Offsets are those of the text before any stop was cut off: from there on they lie behind the
    end of what is shown.
    """

    _detokenizer: Detokenizer
    #: Characters before the next token. At first those of the prompt, where it is echoed.
    certain: int = 0

    def push(self, token_id: int) -> int:
        """The offset of the next token."""
        offset = self.certain
        with suppress(OutputError):
            self.certain += len(self._detokenizer.push(token_id))
        return offset
