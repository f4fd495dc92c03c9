"""What is served, and what of a request is no concern of the engine's."""

from __future__ import annotations

import attrs

from triolet.core import ModelInfo
from triolet.prompt.tokenizer import Tokenizer
from triolet.runtime.backend import Backend


@attrs.frozen
class Served:
    """A loaded model: what computes it and what reads and writes its text."""

    info: ModelInfo
    tokenizer: Tokenizer
    backend: Backend
    #: Bytes of the longest token: what one of the context's tokens can stand for at most.
    longest_token_bytes: int = attrs.field(init=False)

    @longest_token_bytes.default
    def _longest(self) -> int:
        return max(map(len, filter(None, self.tokenizer.vocabulary.token_bytes)), default=1)


@attrs.frozen
class TextOptions:
    """What shapes a request's text and is of no concern to the engine."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    #: Output tokens that a choice has before a stop string can end it.
    min_tokens: int = 0
