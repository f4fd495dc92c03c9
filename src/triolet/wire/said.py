"""What a choice says, in whichever endpoint's words: the one value that all writers take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs

from triolet.core import FinishReason
from triolet.wire.logprobs import ChatLogprobs, CompletionLogprobs

_NOTHING: Mapping[str, object] = MappingProxyType({})


@attrs.frozen
class Said:
    """All that a choice has said, or what is new of it since its last chunk."""

    index: int
    text: str = ""
    #: ``None`` where the client did not ask.
    logprobs: ChatLogprobs | CompletionLogprobs | None = None
    #: ``None`` where the client did not ask.
    token_ids: Sequence[int] | None = None
    #: Set once the choice has finished.
    reason: FinishReason | None = None
    #: The stop id or stop string that ended it.
    stop_reason: int | str | None = None
    #: Whether nothing has been said of the choice before.
    first: bool = False
    #: With the first of a prompt's choices: what the client asked to know of the prompt
    #: (``prompt_token_ids``, ``prompt_logprobs``).
    prompt: Mapping[str, object] = _NOTHING

    @property
    def worth_sending(self) -> bool:
        """Whether there is anything that the client asked for: a chunk says something."""
        return bool(self.text or self.logprobs is not None or self.token_ids or self.reason)
