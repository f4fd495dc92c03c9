"""What the model of a storm says to each request, and what its client has to see of it.

The model's side and the client's are computed apart: what the engine is given are ids, and what a
client must see is worked out from bytes, without the machines that turn the one into the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from triolet.prompt.bytelevel import BYTE_EOS_ID, ByteTokenizer
from triolet.testing.engine import Script
from triolet.testing.schedule import WORDS, Ask

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triolet.core import EngineRequest

#: How a prompt begins: the number of its request and its own, by which the model knows them.
_MARK = re.compile(r"#(\d+)\.(\d+) ")


def prompt_text(ask: Ask, prompt: int) -> str:
    """A prompt of as many characters as asked, or of its mark alone."""
    mark = f"#{ask.number}.{prompt} "
    return mark + "x" * (ask.prompts[prompt] - len(mark))


def line(ask: Ask, choice: int) -> str:
    """All that the model says for one choice, counted over all prompts, if nothing ends it."""
    # Triangular numbers go through all residues of a power of two.
    places = (i * (i + 1) // 2 for i in range(ask.words))
    return "".join(WORDS[(7 * ask.number + 3 * choice + at) % len(WORDS)] for at in places)


@attrs.frozen
class Expected:
    """What one choice comes to that ends by itself."""

    text: str
    #: Ids that it is billed, the one that ends it included.
    tokens: int
    finish: str


def expected(ask: Ask, choice: int) -> Expected:
    """What the client of a choice has to see of it in the end."""
    said = line(ask, choice).encode()
    for count in range(1, ask.max_tokens + 1):
        if count > len(said):
            return Expected(said.decode(), count, "stop")
        # A cut character is no text yet.
        text = said[:count].decode(errors="ignore")
        if ask.stop is not None and (at := text.find(ask.stop)) >= 0:
            return Expected(text[:at], count, "stop")
    return Expected(said[: ask.max_tokens].decode(errors="replace"), ask.max_tokens, "length")


@attrs.frozen
class Lines:
    """The scripts of all requests of a schedule; a :data:`~triolet.testing.engine.Scripts`."""

    asks: Mapping[int, Ask]

    @classmethod
    def of(cls, asks: Iterable[Ask]) -> Lines:
        """The lines of these requests."""
        return cls({ask.number: ask for ask in asks})

    def __call__(self, request: EngineRequest) -> tuple[Script, ...]:
        """One script for each choice."""
        ask, prompt = self._meant(request)
        choices = range(prompt * request.n, (prompt + 1) * request.n)
        return tuple(
            Script(token_ids=tuple(line(ask, choice).encode()), then_id=BYTE_EOS_ID)
            for choice in choices
        )

    def _meant(self, request: EngineRequest) -> tuple[Ask, int]:
        text = ByteTokenizer().decode(request.prompt_ids, skip_special_tokens=True)
        found = _MARK.search(text)
        if found is None:
            raise LookupError(f"the prompt of {request.id} is of no known request")
        return self.asks[int(found[1])], int(found[2])
