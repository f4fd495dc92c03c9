"""Requests by the id that clients know them by: all that are live, and the last that ended. Pure.

Rules:

1. Who is not the owner of a request is told what is told of an id that never was.
2. An ended request leaves its end behind, for clients that ask too late. As many ends are kept as
   :data:`MAX_ENDED`; the oldest goes first. None keeps the request itself alive.
3. Every operation takes the same time however many requests there are.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

import attrs

from triolet.core import RequestId

#: Ends that are kept, of some 300 bytes each. A client that cancels what has just ended does so
#: within seconds; this is as many as a server with a thousand ends a second has in four.
MAX_ENDED = 4096


class Owned(Protocol):
    """What is registered: a live request."""

    @property
    def id(self) -> RequestId:
        """As its client knows it."""

    @property
    def owner(self) -> str:
        """Who may ask for it."""


@attrs.frozen
class Ended:
    """What is left of a request that has ended."""

    owner: str
    #: As in :class:`triolet.runtime.record.RequestRecord`.
    outcome: str


LiveT = TypeVar("LiveT", bound=Owned)


@attrs.define(eq=False)
class Registry(Generic[LiveT]):
    """Finds a request of an owner by its id."""

    max_ended: int = MAX_ENDED
    _live: dict[RequestId, LiveT] = attrs.field(factory=dict, init=False, repr=False)
    #: Oldest first. A plain dict finds its first item in a time that grows with what was deleted.
    _ended: OrderedDict[RequestId, Ended] = attrs.field(
        factory=OrderedDict[RequestId, Ended], init=False, repr=False
    )

    def add(self, request: LiveT) -> None:
        """Register a live request."""
        self._live[request.id] = request

    def end(self, request: LiveT, outcome: str) -> None:
        """Keep the end of a request in its place. A no-op for one that is not live."""
        if self._live.pop(request.id, None) is None:
            return
        self._ended[request.id] = Ended(request.owner, outcome)
        if len(self._ended) > self.max_ended:
            self._ended.popitem(last=False)

    def find(self, request_id: RequestId, owner: str) -> LiveT | Ended | None:
        """The live request, or its end; ``None`` if it is unknown, forgotten or another's."""
        found: LiveT | Ended | None = self._live.get(request_id) or self._ended.get(request_id)
        return found if found is not None and found.owner == owner else None

    def live(self) -> tuple[LiveT, ...]:
        """All live requests, in the order of their admission."""
        return tuple(self._live.values())
