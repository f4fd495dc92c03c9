"""What one event of a completion stream says, whoever wrote it. Pure.

Servers leave out what OpenAI's always has, put ``null`` where a string belongs and add fields of
their own. Reading takes what it knows by name and type and overlooks the rest; it never fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

_NOTHING: Mapping[str, object] = MappingProxyType({})


@attrs.frozen
class Delta:
    """What one event adds to one choice."""

    choice: int
    #: ``delta.content`` of a chat, ``text`` of a completion.
    text: str = ""
    #: ``delta.reasoning_content`` or ``delta.reasoning``: text that is not part of the answer.
    reasoning: str = ""
    #: As the server says it: ``stop``, ``length`` and the like, set with a choice's last event.
    finish_reason: str | None = None
    #: The rest, as it came: role, tool calls, logprobs.
    data: Mapping[str, object] = attrs.field(default=_NOTHING, repr=False)

    @property
    def visible(self) -> bool:
        """Whether it shows a token: text, reasoning, or a piece of a tool call."""
        if self.text or self.reasoning:
            return True
        delta = self.data.get("delta")
        return isinstance(delta, dict) and bool(delta.get("tool_calls"))


@attrs.frozen
class TokenCounts:
    """The ``usage`` of a request. ``None`` is what the server did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


def read_deltas(data: Mapping[str, object]) -> tuple[Delta, ...]:
    """The deltas of a chunk: none for a chunk that has only usage, or that is none."""
    choices = data.get("choices")
    if not isinstance(choices, list):
        return ()
    return tuple(_delta(choice) for choice in choices if isinstance(choice, dict))


def read_usage(data: Mapping[str, object]) -> TokenCounts | None:
    """The token counts of a chunk, or ``None`` where it has none."""
    usage = data.get("usage")
    if not isinstance(usage, dict):
        return None
    counts = TokenCounts(
        prompt_tokens=_count(usage, "prompt_tokens"),
        completion_tokens=_count(usage, "completion_tokens"),
        cached_tokens=_count(usage.get("prompt_tokens_details"), "cached_tokens"),
        reasoning_tokens=_count(usage.get("completion_tokens_details"), "reasoning_tokens"),
    )
    return None if counts == TokenCounts() else counts


def _delta(choice: Mapping[str, object]) -> Delta:
    delta = choice.get("delta")
    said: Mapping[str, object] = delta if isinstance(delta, dict) else _NOTHING
    reason = choice.get("finish_reason")
    return Delta(
        choice=_count(choice, "index") or 0,
        text=_string(said, "content") or _string(choice, "text"),
        reasoning=_string(said, "reasoning_content") or _string(said, "reasoning"),
        finish_reason=reason if isinstance(reason, str) and reason else None,
        data=choice,
    )


def _string(data: Mapping[str, object], name: str) -> str:
    value = data.get(name)
    return value if isinstance(value, str) else ""


def _count(data: object, name: str) -> int | None:
    value = data.get(name) if isinstance(data, dict) else None
    return value if type(value) is int and value >= 0 else None
