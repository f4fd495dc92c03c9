"""Stop strings: release text that can no longer turn into one.

Rules:

1. The stop whose match ends first wins; of those that end at the same character, the first in
   the list. Both are facts of the text, so the result cannot depend on how it was chunked.
   ("Starts first" would not do: a match in progress would have to be waited for.)
2. Text is cut where the winning match starts, or where it ends with ``include_stop``.
3. Held back is the longest suffix that is a proper prefix of some stop, and no character more.
   With ``include_stop`` nothing is: the characters are shown whether they match or not.
4. A match whose last character came with ``counts=False`` is no stop, but text like any other:
   nothing is held for it alone. One that only began there can still become a stop.
5. After a stop: silence.

Theory of operation: the automaton of Aho and Corasick ("Efficient string matching: an aid to
bibliographic search", Communications of the ACM 18(6), 1975). A state is the longest suffix of
the text so far that is a prefix of some stop, so its depth is the number of characters to hold.
Time per character is constant on average and independent of the number of stops; building takes
time and memory linear in their total length.
"""

from __future__ import annotations

from collections import deque

import attrs

from triolet.errors import InvalidRequestError

# The state in which no stop has begun.
_ROOT = 0


@attrs.frozen
class Released:
    """Text that is certain, and the stop that ended it, if one did."""

    text: str
    stop: str | None = None


class _Automaton:
    """The states of all stops; never changed once built, so choices share it."""

    __slots__ = ("completed", "depth", "fallback", "goto")

    def __init__(self, stops: tuple[str, ...]) -> None:
        #: Per state, the next state for each character that continues a prefix.
        self.goto: list[dict[str, int]] = [{}]
        #: Per state, the one of its longest proper suffix: where a mismatch goes on.
        self.fallback: list[int] = [_ROOT]
        #: Per state, its length in characters.
        self.depth: list[int] = [0]
        #: Per state, the index of the first stop in the list that ends here.
        self.completed: list[int | None] = [None]
        for index, stop in enumerate(stops):
            self._add(stop, index)
        self._link()

    def _add(self, stop: str, index: int) -> None:
        state = _ROOT
        for char in stop:
            following = self.goto[state].get(char)
            if following is None:
                following = len(self.goto)
                self.goto[state][char] = following
                self.goto.append({})
                self.fallback.append(_ROOT)
                self.depth.append(self.depth[state] + 1)
                self.completed.append(None)
            state = following
        if self.completed[state] is None:
            self.completed[state] = index

    def _link(self) -> None:
        # Breadth first: the fallback of a state is shallower, so it is finished before it.
        queue = deque(self.goto[_ROOT].values())
        while queue:
            state = queue.popleft()
            for char, following in self.goto[state].items():
                self.fallback[following] = self.step(self.fallback[state], char)
                queue.append(following)
            own, inherited = self.completed[state], self.completed[self.fallback[state]]
            if own is None or (inherited is not None and inherited < own):
                self.completed[state] = inherited

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while True:
            following = self.goto[state].get(char)
            if following is not None:
                return following
            if state == _ROOT:
                return _ROOT
            state = self.fallback[state]

    def growing(self, state: int) -> int:
        """The state of the longest suffix that can still become a stop.

        It differs from ``state`` only where a whole stop was let pass, and leads on to the same.
        """
        while state != _ROOT and not self.goto[state]:
            state = self.fallback[state]
        return state


def _checked(_: object, __: object, stops: tuple[str, ...]) -> None:
    if "" in stops:
        raise InvalidRequestError("A stop string must not be empty.", param="stop")


@attrs.define(eq=False)
class StopMatcher:
    """Finds the first stop in a text that arrives in pieces.

    Raises:
        InvalidRequestError: A stop is empty; ``param`` is ``stop``.
    """

    stops: tuple[str, ...] = attrs.field(validator=_checked)
    include_stop: bool = False
    _automaton: _Automaton = attrs.field(
        default=attrs.Factory(lambda self: _Automaton(self.stops), takes_self=True),
        kw_only=True,
        repr=False,
    )
    _state: int = attrs.field(init=False, default=_ROOT)
    _held: str = attrs.field(init=False, default="")
    _stopped: bool = attrs.field(init=False, default=False)

    def fresh(self) -> StopMatcher:
        """A matcher of the same stops at the start of a text, at no building cost."""
        return StopMatcher(self.stops, self.include_stop, automaton=self._automaton)

    def feed(self, text: str, *, counts: bool = True) -> Released:
        """Take the next piece; give what is certain. The last with a ``stop`` is the end.

        Args:
            text: What follows the pieces before.
            counts: Whether a match that ends in this piece is a stop.
        """
        if self._stopped:
            return Released("")
        if not self.stops:
            return Released(text)
        automaton, state = self._automaton, self._state
        # Most pieces hold no character that begins a stop; asking that once is fastest.
        if state == _ROOT and automaton.goto[_ROOT].keys().isdisjoint(text):
            return Released(text)
        step, completed = automaton.step, automaton.completed
        for position, char in enumerate(text):
            state = step(state, char)
            index = completed[state]
            if counts and index is not None:
                return self._stop(text[: position + 1], self.stops[index])
        if not counts:
            state = automaton.growing(state)
        self._state = state
        if self.include_stop:
            return Released(text)
        text = self._held + text
        certain = len(text) - automaton.depth[state]
        self._held = text[certain:]
        return Released(text[:certain])

    def _stop(self, text: str, stop: str) -> Released:
        text = self._held + text
        self._stopped = True
        self._held = ""
        return Released(text if self.include_stop else text[: -len(stop)], stop)

    def finish(self) -> str:
        """The held text: nothing follows that could make it a stop."""
        held = self._held
        self._held = ""
        self._state = _ROOT
        return held
