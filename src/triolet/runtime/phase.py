"""Where a server is in its life, and what it tells whom it does not serve there."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from triolet.errors import DrainingError, EngineDownError, NotReadyError

if TYPE_CHECKING:
    from triolet.errors import CapacityError

#: What a client is told to wait while the model loads; loads take seconds to minutes.
LOADING_RETRY_AFTER_S = 5.0
#: A drained server, or one whose engine died, is usually replaced by another within this time.
DRAINING_RETRY_AFTER_S = 5.0


class Phase(StrEnum):
    """Where the server is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


def refusal(phase: Phase, *, failed: bool) -> CapacityError:
    """Why no request is taken now.

    Args:
        phase: Where the server is.
        failed: Whether it is on its way out because its engine died, or never came up.
    """
    if failed:
        return engine_down()
    if phase is Phase.STARTING:
        return NotReadyError(
            "The model is still loading; try again after the time in Retry-After.",
            retry_after_s=LOADING_RETRY_AFTER_S,
        )
    return DrainingError(
        "The server is shutting down and takes no new requests.",
        retry_after_s=DRAINING_RETRY_AFTER_S,
    )


def engine_down() -> EngineDownError:
    """What requests end with whose engine died, and those that come after."""
    return EngineDownError(
        "The engine has stopped; this server will restart.", retry_after_s=DRAINING_RETRY_AFTER_S
    )
