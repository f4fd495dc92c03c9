"""The states of a request and what moves it from one to the next. Pure.

Rules:

1. A request is in one state. :data:`TRANSITIONS` has every move that there is; any other is a
   bug of the caller, which :func:`after` raises.
2. There are four ends. A request that has ended stays as it is, whatever happens: the first
   end wins, and a second one is nothing rather than an error, since causes race.
3. From every other state each way of ending by force (cancelled, failed) is open.

The diagram in the documentation is drawn from this table.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping


class _Described(StrEnum):
    """A name with a sentence about it, which is its docstring."""

    def __new__(cls, value: str, text: str) -> Self:
        """Make a member of its value and its sentence."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.__doc__ = text
        return member


class State(_Described):
    """Where a request is in its life."""

    RECEIVED = "received", "It has a place; its body is being read and its prompt tokenized."
    QUEUED = "queued", "The engine has it and has not begun with any of its prompts."
    RUNNING = "running", "The engine computes it, or has set it back for want of blocks."
    PAUSED = "paused", "Its reader lags: the engine generates nothing more for it for now."
    FINISHED = "finished", "All text was generated."
    REJECTED = "rejected", "Refused before it was admitted."
    CANCELLED = "cancelled", "Ended from outside: by the client, a deadline, a drain."
    FAILED = "failed", "The engine or the output path failed."


class Move(_Described):
    """What happens to a request."""

    ADMIT = "admit", "It goes to the engine."
    REFUSE = "refuse", "It is at fault, or the server cannot take it."
    START = "start", "The engine computes the first of its prompt tokens."
    PAUSE = "pause", "Its undelivered output reaches the bound."
    RESUME = "resume", "Its undelivered output falls below half of the bound."
    FINISH = "finish", "Its last choice is complete."
    CANCEL = "cancel", "A client, a deadline, a slow reader or a drain ends it."
    FAIL = "fail", "An error ends it that is not the client's."


#: The states that nothing leads out of.
ENDED: frozenset[State] = frozenset({
    State.FINISHED,
    State.REJECTED,
    State.CANCELLED,
    State.FAILED,
})

#: Every move from a state that is no end.
TRANSITIONS: Mapping[tuple[State, Move], State] = MappingProxyType({
    (State.RECEIVED, Move.ADMIT): State.QUEUED,
    (State.RECEIVED, Move.REFUSE): State.REJECTED,
    (State.RECEIVED, Move.CANCEL): State.CANCELLED,
    (State.RECEIVED, Move.FAIL): State.FAILED,
    (State.QUEUED, Move.START): State.RUNNING,
    (State.QUEUED, Move.CANCEL): State.CANCELLED,
    (State.QUEUED, Move.FAIL): State.FAILED,
    (State.RUNNING, Move.PAUSE): State.PAUSED,
    (State.RUNNING, Move.FINISH): State.FINISHED,
    (State.RUNNING, Move.CANCEL): State.CANCELLED,
    (State.RUNNING, Move.FAIL): State.FAILED,
    (State.PAUSED, Move.RESUME): State.RUNNING,
    # What was under way when the pause took effect can be its last text.
    (State.PAUSED, Move.FINISH): State.FINISHED,
    (State.PAUSED, Move.CANCEL): State.CANCELLED,
    (State.PAUSED, Move.FAIL): State.FAILED,
})


class IllegalMoveError(Exception):
    """A request was moved in a way that its state does not have: a bug in the runtime."""


def after(state: State, move: Move) -> State:
    """The state that a move leads to; the same one if the request has ended.

    Raises:
        IllegalMoveError: There is no such move from this state.
    """
    if state in ENDED:
        return state
    try:
        return TRANSITIONS[state, move]
    except KeyError:
        raise IllegalMoveError(f"a request that is {state} cannot {move}") from None
