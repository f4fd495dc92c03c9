"""Readers of one value each: text from a flag or variable, or a typed value from a file.

A :class:`Reader` takes the raw value and returns the value as the program uses it. Reading what
it returned gives the same again, so one reader serves the command line, the environment, the
file and ``Config(...)`` in code. It refuses with a :class:`ValueError` whose text completes the
sentence "<name of the setting> ...", for example "must be a number of seconds".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Generic, TypeVar

import attrs

T_co = TypeVar("T_co", covariant=True)

#: The largest value of a C int: what the kernel and torch take for sizes and counts.
MAX_INT = 2**31 - 1
#: Seconds. Eleven days: longer than any wait makes sense, and its milliseconds fit 32 bits.
MAX_SECONDS = 1_000_000.0
#: Milliseconds. A scripted token that takes longer than a minute is a typing error.
MAX_STEP_MS = 60_000.0
#: Characters of a refused value that an error repeats.
MAX_SHOWN = 60

_COUNT_SUFFIXES = {
    "": 1, "k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2,
}  # fmt: skip
_BYTE_SUFFIXES = {
    "": 1, "b": 1,
    "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4,
    "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4,
}  # fmt: skip
_SWITCH_WORDS = {
    "1": True, "true": True, "yes": True, "on": True,
    "0": False, "false": False, "no": False, "off": False,
}  # fmt: skip
_SCALED = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)", re.ASCII)


@attrs.frozen
class Reader(Generic[T_co]):
    """Turns a raw value into one that fits, or raises ``ValueError`` as this module says."""

    _read: Callable[[object], T_co] = attrs.field(repr=False)
    #: Stands for the value in help and docs.
    metavar: str
    #: Whether the flag is a pair, ``--x`` and ``--no-x``, that takes no value.
    switch: bool = False
    #: Whether the value is a tuple and the flag may be repeated.
    repeatable: bool = False

    def __call__(self, raw: object) -> T_co:
        """The value that ``raw`` means."""
        return self._read(raw)


def shown(raw: object) -> str:
    """``raw`` as an error repeats it: on one line and of bounded length."""
    text = repr(raw)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def whole(least: int = 1, most: int = MAX_INT, metavar: str = "N") -> Reader[int]:
    """A whole number between two bounds, both included."""

    def read(raw: object) -> int:
        value = _scaled(raw, {"": 1})
        if value is None or not least <= value <= most:
            raise ValueError(f"must be a whole number from {least} to {most}, not {shown(raw)}")
        return value

    return Reader(read, metavar)


def token_count() -> Reader[int]:
    """A number of tokens, at least 1; vLLM's suffixes: ``8k`` is 8000, ``8K`` is 8192."""

    def read(raw: object) -> int:
        value = _scaled(raw, _COUNT_SUFFIXES)
        if value is None or not 1 <= value <= MAX_INT:
            raise ValueError(
                "must be a number of tokens, at least 1, such as 8192, 8k (8000) or 8K (8192), "
                f"not {shown(raw)}"
            )
        return value

    return Reader(read, "TOKENS")


def byte_count(least: int = 1, most: int = 2**63 - 1) -> Reader[int]:
    """A size in bytes, with or without a unit."""

    def read(raw: object) -> int:
        value = _scaled(raw.lower() if isinstance(raw, str) else raw, _BYTE_SUFFIXES)
        if value is None or not least <= value <= most:
            raise ValueError(
                f"must be a size from {least} to {most} bytes, such as 65536, 64KiB or 2GiB, "
                f"not {shown(raw)}"
            )
        return value

    return Reader(read, "BYTES")


def seconds(*, zero: bool = False) -> Reader[float]:
    """A finite duration in seconds; zero only where the setting says what zero means."""

    def read(raw: object) -> float:
        value = _number(raw)
        if not 0 <= value <= MAX_SECONDS or (value == 0 and not zero):  # NaN is in no range
            least = "0 or more" if zero else "more than 0"
            raise ValueError(
                f"must be a number of seconds, {least} and at most {MAX_SECONDS:.0f}, "
                f"not {shown(raw)}"
            )
        return value

    return Reader(read, "SECONDS")


def milliseconds() -> Reader[float]:
    """A finite duration in milliseconds, zero included."""

    def read(raw: object) -> float:
        value = _number(raw)
        if not 0 <= value <= MAX_STEP_MS:  # NaN is in no range
            raise ValueError(
                f"must be a number of milliseconds from 0 to {MAX_STEP_MS:.0f}, not {shown(raw)}"
            )
        return value

    return Reader(read, "MS")


def share() -> Reader[float]:
    """A part of a whole: more than 0, at most 1."""

    def read(raw: object) -> float:
        value = _number(raw)
        if not 0 < value <= 1:  # NaN is in no range
            raise ValueError(f"must be a number above 0 and at most 1, not {shown(raw)}")
        return value

    return Reader(read, "SHARE")


def switch() -> Reader[bool]:
    """On or off."""

    def read(raw: object) -> bool:
        value = raw if isinstance(raw, bool) else _SWITCH_WORDS.get(str(raw).strip().lower())
        if value is None:
            raise ValueError(f"must be true or false, not {shown(raw)}")
        return value

    return Reader(read, "true|false", switch=True)


def choice(*words: str, also: dict[str, str] | None = None) -> Reader[str]:
    """One of a few words, in any case. ``also`` maps other spellings to one of them."""
    spellings = {word: word for word in words} | (also or {})
    allowed = ", ".join(words[:-1]) + " or " + words[-1]

    def read(raw: object) -> str:
        word = spellings.get(raw.strip().lower()) if isinstance(raw, str) else None
        if word is None:
            raise ValueError(f"must be {allowed}, not {shown(raw)}")
        return word

    return Reader(read, "|".join(words))


def text(
    metavar: str, what: str, pattern: str = r"[^\x00-\x1f\x7f]+", most: int = 4096
) -> Reader[str]:
    """Text of at most ``most`` characters, all of it matched by ``pattern``; ``what`` says what."""

    def read(raw: object) -> str:
        if not isinstance(raw, str) or len(raw) > most or re.fullmatch(pattern, raw) is None:
            raise ValueError(f"must be {what}, not {shown(raw)}")
        return raw

    return Reader(read, metavar)


def several(item: Reader[str]) -> Reader[tuple[str, ...]]:
    """Any number of texts: repeated flags, a list in a file, commas between in a variable."""

    def read(raw: object) -> tuple[str, ...]:
        items = (raw,) if isinstance(raw, str) else raw
        if not isinstance(items, (list, tuple)):
            raise ValueError(f"must be a list, not {shown(raw)}")  # noqa: TRY004 - see Reader
        return tuple(item(each) for each in items)

    return Reader(read, item.metavar, repeatable=True)


def _scaled(raw: object, suffixes: dict[str, int]) -> int | None:
    """A whole number with an optional suffix, or None where ``raw`` is not one."""
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    match = _SCALED.fullmatch(raw.strip()) if isinstance(raw, str) else None
    scale = suffixes.get(match[2]) if match is not None else None
    if match is None or scale is None:
        return None
    digits, _, fraction = match[1].partition(".")
    numerator, denominator = int(digits + fraction) * scale, 10 ** len(fraction)
    return numerator // denominator if numerator % denominator == 0 else None


def _number(raw: object) -> float:
    """``raw`` as a float; NaN where it is no number, which every bound refuses."""
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        return math.nan
    try:
        return float(raw)
    except (ValueError, OverflowError):
        return math.nan
