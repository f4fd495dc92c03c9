"""What a request says, in the order it says it: the events that every reader folds.

A stream is, where it was asked for, one :class:`PromptScored` per prompt of more than one token;
any number of :class:`TextDelta` and, per choice, one :class:`ChoiceFinished`; then exactly one
terminal event: :class:`Completed`, or :class:`Failed` at any time.

Choices are numbered over the whole request: choice i of prompt p, n each, is ``p * n + i``.
"""

from __future__ import annotations

import attrs

from triolet.core import FinishReason, TokenLogprobs
from triolet.errors import TrioletError


@attrs.frozen
class Usage:
    """Token counts of a request. ``output_tokens`` counts accepted ids, the stop token included.

    ``prompt_tokens`` is the sum over its prompts, each counted once whatever ``n`` is.
    """

    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@attrs.frozen
class TextDelta:
    """Text that can no longer change, and the ids accepted since the last delta."""

    choice: int
    text: str
    token_ids: tuple[int, ...] = ()
    #: One entry per id, where they were asked for; else empty.
    logprobs: tuple[TokenLogprobs, ...] = ()


@attrs.frozen
class PromptScored:
    """How likely the prompt's tokens were; comes before any text of its choices.

    ``prompt`` is the index of the prompt, 0 where there is one. ``logprobs`` has one entry for
    each of its tokens but the first.
    """

    prompt: int
    logprobs: tuple[TokenLogprobs, ...]


@attrs.frozen
class ChoiceFinished:
    """A choice ended by itself. ``stop_reason`` is the stop id or stop string, if one did it."""

    choice: int
    reason: FinishReason
    stop_reason: int | str | None = None


@attrs.frozen
class Completed:
    """All choices finished: the success end."""

    usage: Usage


@attrs.frozen
class Failed:
    """The request ended in any other way. ``usage`` is what had been accepted by then."""

    error: TrioletError
    usage: Usage


OutputEvent = TextDelta | PromptScored | ChoiceFinished | Completed | Failed
