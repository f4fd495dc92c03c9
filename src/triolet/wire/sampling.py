"""The types of the fields that say which tokens may be chosen: their limits and their readers.

What a value does is said where it is done, at :class:`triolet.core.SamplingParams`. A limit that
the server's configuration can lower or the model decides (``--max-n``, the size of the
vocabulary) is not checked here but where both are known, in :mod:`triolet.server.translate`.
"""

from __future__ import annotations

from typing import Annotated

from triolet.wire.codec import FieldError, Length, ReadBy, Within, converter, mismatch, read_object

#: OpenAI takes 4. Role-play and agent front ends send one per speaker, and 32 is beyond theirs;
#: each costs memory in the matcher of every choice.
MAX_STOPS = 32
#: Characters of one stop string: a paragraph. Text up to this length may have to be held back.
MAX_STOP_CHARACTERS = 1024
#: Of all stop strings together. The matcher keeps about 350 bytes for each.
MAX_STOPS_CHARACTERS = 4096
#: More than any model has end-of-turn tokens.
MAX_STOP_TOKEN_IDS = 256
#: The engine keeps ids in signed 32-bit tensors; the model's vocabulary is checked later.
MAX_TOKEN_ID = 2**31 - 1
#: Entries of ``logit_bias``. Each is written into the logits at every step; whoever has more to
#: say about a vocabulary has ``allowed_token_ids``.
MAX_BIASES = 1024
#: OpenAI's: already 20 decides nearly every draw, and 100 bans or forces.
MAX_BIAS = 100.0
#: Ids of ``allowed_token_ids``: twice the largest vocabulary we know (Gemma 3, 262,208).
MAX_ALLOWED_TOKEN_IDS = 2**19
#: ``bad_words``: each is tokenized twice before the request starts and compared at every step.
MAX_BAD_WORDS = 256
#: Characters of one bad word: it is a word or a phrase.
MAX_BAD_WORD_CHARACTERS = 256
#: Far beyond every use (1 is off, 1.3 is much), and far from where float32 logits overflow.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100

_UINT64 = 2**64


def _read_stop(value: object) -> tuple[str, ...]:
    if type(value) is str:
        return (_read_one_stop(value),)
    if type(value) is not list:
        raise mismatch("a string or an array of strings", value)
    if len(value) > MAX_STOPS:
        raise FieldError(f"must have at most {MAX_STOPS} strings, not {len(value)}.")
    stops: list[str] = []
    for index, item in enumerate(value):
        try:
            stops.append(_read_one_stop(item))
        except FieldError as error:
            raise error.under(index) from None
    total = sum(map(len, stops))
    if total > MAX_STOPS_CHARACTERS:
        raise FieldError(
            f"must have at most {MAX_STOPS_CHARACTERS} characters in all, not {total}."
        )
    return tuple(stops)


def _read_one_stop(value: object) -> str:
    if type(value) is not str:
        raise mismatch("a string", value)
    if not value:
        raise FieldError("must not be empty: every text contains the empty string.")
    if len(value) > MAX_STOP_CHARACTERS:
        raise FieldError(f"must have at most {MAX_STOP_CHARACTERS} characters, not {len(value)}.")
    return value


def _read_seed(value: object) -> int:
    # The JSON parser gives a float for an integer beyond 64 bits, signed or unsigned.
    if type(value) is not int:
        raise mismatch("an integer of at most 64 bits", value)
    return value % _UINT64


def _read_top_k(value: object) -> int:
    if type(value) is not int:
        raise mismatch("an integer", value)
    Within(-1).check(value)
    # Beyond every vocabulary, and beyond what a tensor's integer holds: all of it.
    return min(max(value, 0), MAX_TOKEN_ID)


def _read_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    pairs = read_object(value)
    if len(pairs) > MAX_BIASES:
        raise FieldError(f"must have at most {MAX_BIASES} entries, not {len(pairs)}.")
    biases: list[tuple[int, float]] = []
    for key, bias in pairs.items():
        token_id = _read_id(key)
        try:
            if type(bias) is not int and type(bias) is not float:
                raise mismatch("a number", bias)
            Within(-MAX_BIAS, MAX_BIAS).check(bias)
        except FieldError as error:
            raise error.under(key) from None
        biases.append((token_id, float(bias)))
    return tuple(biases)


def _read_id(key: str) -> int:
    """The token id that a key of an object stands for; JSON has no keys but strings."""
    # Only the shortest way to write it: two keys must not mean one id.
    if key.isascii() and key.isdecimal() and len(key) <= len(str(MAX_TOKEN_ID)):
        token_id = int(key)
        if str(token_id) == key and token_id <= MAX_TOKEN_ID:
            return token_id
    raise mismatch("an object with token ids as keys", key)


def read_ids(value: object, most: int) -> tuple[int, ...]:
    """Read an array of 1 to ``most`` token ids.

    Raises:
        FieldError: It is no such array; the path leads to the item at fault.
    """
    if type(value) is not list:
        raise mismatch("an array of token ids", value)
    Length(1, most).check(value)
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MAX_TOKEN_ID:
        # Ten times faster than the converter, which then only has to find the error.
        return tuple(value)
    return converter.structure(value, _Ids)


def _read_allowed(value: object) -> frozenset[int]:
    return frozenset(read_ids(value, MAX_ALLOWED_TOKEN_IDS))


Count = Annotated[int, Within(0)]
Choices = Annotated[int, Within(1)]
TokenId = Annotated[int, Within(0, MAX_TOKEN_ID)]
TokenLimit = Annotated[int, Within(1)]
Temperature = Annotated[float, Within(0, 2)]
TopP = Annotated[float, Within(0, 1, low_open=True)]
#: 0 is off; a client may also write -1.
TopK = Annotated[int, ReadBy(_read_top_k)]
MinP = Annotated[float, Within(0, 1)]
RepetitionPenalty = Annotated[float, Within(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)]
#: OpenAI's bounds, for presence and frequency.
Penalty = Annotated[float, Within(-2, 2)]
LogitBias = Annotated[tuple[tuple[int, float], ...], ReadBy(_read_logit_bias)]
AllowedTokenIds = Annotated[frozenset[int], ReadBy(_read_allowed)]
BadWords = Annotated[
    tuple[Annotated[str, Length(1, MAX_BAD_WORD_CHARACTERS)], ...], Length(0, MAX_BAD_WORDS)
]
#: Unsigned 64-bit; a negative one is read as its two's complement.
Seed = Annotated[int, ReadBy(_read_seed)]
Stop = Annotated[tuple[str, ...], ReadBy(_read_stop)]
StopTokenIds = Annotated[tuple[TokenId, ...], Length(0, MAX_STOP_TOKEN_IDS)]
_Ids = tuple[TokenId, ...]
