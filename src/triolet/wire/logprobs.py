"""How likely tokens were, in the three forms that clients know: chat, completions, prompt.

Rules:

1. The k of ``top_logprobs`` are the true k most likely tokens. The token that was chosen has its
   own field and takes none of their places.
2. In the completions form the k stand in an object, text to number, which has the chosen token
   too where it is not one of them: OpenAI documents up to k + 1. Of two tokens with one text it
   has the more likely one.
3. An entry is a function of its own token and its place alone, so the lists of a stream's chunks,
   joined, are those of the whole response.

What tokens are called, and that numbers are finite, is the speller's business:
:class:`triolet.output.logprobs.Spelling`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypedDict

if TYPE_CHECKING:
    from triolet.core import TokenLogprobs


class Spelled(Protocol):
    """A token as a client reads it."""

    @property
    def token(self) -> str:
        """Its text, or what stands for it."""

    @property
    def data(self) -> tuple[int, ...] | None:
        """The bytes that it adds to the text; ``None`` where it adds none."""

    @property
    def logprob(self) -> float:
        """Natural logarithm, finite."""


#: From a token id and its log-probability.
Speller = Callable[[int, float], Spelled]


class TopLogprob(TypedDict):
    """One of the most likely tokens, in the chat form."""

    token: str
    logprob: float
    #: The token's own bytes. Those of a text's tokens, joined, are the text.
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    """An output token, in the chat form."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """The ``logprobs`` of a choice of a chat; clients join the lists of a stream's chunks."""

    content: list[ChatTokenLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    """The ``logprobs`` of a choice of a text completion: four lists of one length."""

    tokens: list[str]
    #: ``null`` for the first token of an echoed prompt, which nothing predicts.
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    #: Where in the choice's text the token begins, in characters.
    text_offset: list[int]


class PromptLogprob(TypedDict):
    """One token at a place of the prompt, in vLLM's form."""

    logprob: float
    #: Place among all tokens, from 1.
    rank: int
    decoded_token: str


#: By token id, as a string; ``None`` at the first place.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


def chat_logprobs(
    entries: Sequence[TokenLogprobs], spell: Speller, *, top: int
) -> ChatLogprobs | None:
    """Write output tokens in the chat form, with the ``top`` most likely ones of each.

    ``None`` where there are no tokens.
    """
    if not entries:
        return None
    content: list[ChatTokenLogprob] = []
    for entry in entries:
        chosen = spell(entry.token_id, entry.logprob)
        content.append({
            "token": chosen.token,
            "logprob": chosen.logprob,
            "bytes": None if chosen.data is None else list(chosen.data),
            "top_logprobs": [_top(spell(*pair)) for pair in entry.top[:top]],
        })
    return {"content": content, "refusal": None}


def _top(spelled: Spelled) -> TopLogprob:
    return {
        "token": spelled.token,
        "logprob": spelled.logprob,
        "bytes": None if spelled.data is None else list(spelled.data),
    }


def completion_logprobs(
    entries: Sequence[TokenLogprobs | int], offsets: Sequence[int], spell: Speller, *, top: int
) -> CompletionLogprobs | None:
    """Write tokens in the completions form; ``None`` where there are none.

    Args:
        entries: The tokens; an id alone stands for one that nothing predicted.
        offsets: Where each begins in the choice's text, in characters.
        spell: What the tokens are called.
        top: So many of the most likely ones.
    """
    if not entries:
        return None
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if isinstance(entry, int):
            tokens.append(spell(entry, 0.0).token)
            logprobs.append(None)
            tops.append(None)
            continue
        chosen = spell(entry.token_id, entry.logprob)
        tokens.append(chosen.token)
        logprobs.append(chosen.logprob)
        likely: dict[str, float] = {}
        for one in (*(spell(*pair) for pair in entry.top[:top]), chosen):
            likely.setdefault(one.token, one.logprob)
        tops.append(likely)
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprobs], spell: Speller, *, top: int
) -> PromptLogprobs:
    """Write a prompt's tokens in vLLM's form: ``None``, then one object for each later token.

    The prompt's own token comes first, then the most likely ones that it is not.
    """
    written: PromptLogprobs = [None]
    for entry in entries:
        place = {str(entry.token_id): _ranked(spell(entry.token_id, entry.logprob), entry.rank)}
        rank = 1
        for index, (token_id, logprob) in enumerate(entry.top[:top]):
            # Equally likely tokens share the best of their places.
            if index and logprob < entry.top[index - 1][1]:
                rank = index + 1
            if token_id != entry.token_id:
                place[str(token_id)] = _ranked(spell(token_id, logprob), rank)
        written.append(place)
    return written


def _ranked(spelled: Spelled, rank: int) -> PromptLogprob:
    return {"logprob": spelled.logprob, "rank": rank, "decoded_token": spelled.token}
