"""``/v1/completions``: what comes in. What goes out is in :mod:`triolet.wire.completion_reply`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar

import attrs

from triolet.wire.codec import FieldError, ReadBy, Within, mismatch
from triolet.wire.common import REFUSED, GenerationFields
from triolet.wire.sampling import read_ids

#: Ids of one prompt, and of all prompts of one request. Beyond the context of any model we know
#: how to serve, and read in a quarter of a second.
MAX_PROMPT_IDS = 2**20
#: Prompts of one request: each becomes a request to the engine, which runs them as it can.
#: Evaluation harnesses, the only users of more than a few, send batches of 1 to 64.
MAX_PROMPTS = 128
#: Prompts times ``n``: each choice has its own text machines and buffers until the request ends.
MAX_CHOICES = 256

OnePrompt = str | tuple[int, ...]


def _read_prompts(value: object) -> tuple[OnePrompt, ...]:
    if type(value) is not list or not value or type(value[0]) is int:
        return (_read_one_prompt(value),)
    if len(value) > MAX_PROMPTS:
        raise FieldError(f"must have at most {MAX_PROMPTS} prompts, not {len(value)}.")
    prompts: list[OnePrompt] = []
    for index, item in enumerate(value):
        try:
            prompts.append(_read_one_prompt(item))
        except FieldError as error:
            raise error.under(index) from None
    ids = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
    if ids > MAX_PROMPT_IDS:
        raise FieldError(f"must have at most {MAX_PROMPT_IDS} token ids in all, not {ids}.")
    return tuple(prompts)


def _read_one_prompt(value: object) -> OnePrompt:
    if type(value) is str:
        if not value:
            raise FieldError("must not be empty.")
        return value
    if type(value) is not list:
        raise mismatch("a string or an array of token ids", value)
    return read_ids(value, MAX_PROMPT_IDS)


def _read_logprobs(value: object) -> int | None:
    # What clients of the chat endpoint send for "none".
    if value is False:
        return None
    if type(value) is not int:
        raise mismatch("an integer", value)
    Within(0).check(value)
    return value


@attrs.frozen(kw_only=True)
class CompletionRequest(GenerationFields):
    """The body of a text completion request."""

    #: Texts, or token ids. Not in the repr, so that no log line holds one by accident.
    prompt: Annotated[tuple[OnePrompt, ...], ReadBy(_read_prompts)] = attrs.field(repr=False)
    echo: bool = False
    #: How many of the most likely tokens to report with each token, if any.
    logprobs: Annotated[int | None, ReadBy(_read_logprobs)] = None
    add_special_tokens: bool = True
    refuses: ClassVar[Mapping[str, tuple[object, ...]]] = MappingProxyType({
        **REFUSED,
        "top_logprobs": (0,),
        # Text to end at: it takes a model trained to fill in the middle, and its own tokens.
        "suffix": ("",),
    })

    @property
    def token_limit(self) -> int | None:
        """The limit of output tokens."""
        return self.max_tokens

    @property
    def output_logprobs(self) -> int | None:
        """How many of the most likely tokens to report with each output token, if any."""
        return self.logprobs
