"""What systemd, or whoever else set ``NOTIFY_SOCKET``, is told of the server's life.

The protocol is that of sd_notify(3): lines of ``NAME=value`` in one datagram. Rules:

1. ``READY=1`` once the model is loaded and the port open; ``STOPPING=1`` when a drain begins;
   ``STATUS=`` whenever it differs from the last one.
2. With ``STOPPING=1`` goes, once, ``EXTEND_TIMEOUT_USEC=``: the time in which the drain ends,
   so a unit's ``TimeoutStopSec=`` below the drain timeout cuts no streams. Once, because a drain
   that hangs must not extend its own life.
3. ``WATCHDOG=1`` at least twice in ``WATCHDOG_USEC``, while the engine lives. An event loop that
   hangs says nothing, which is the point: it also hangs with a step that keeps the GIL.
4. To tell is best effort. It never blocks and never raises; what could not be said is said
   again at the next occasion.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from typing import TYPE_CHECKING

import attrs
import trio

from triolet.runtime.lifecycle import Phase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from triolet.runtime.lifecycle import Runtime

logger = logging.getLogger(__name__)

#: Seconds between two words where no watchdog asks for more: how old a status can be.
LONGEST_SILENCE_S = 5.0
#: Seconds between two words at least: a watchdog below twice this is a typing error.
SHORTEST_SILENCE_S = 0.05
#: Seconds that the process may take to exit after the drain timeout: the two of the contract
#: (§10), and as many for a busy machine.
EXIT_MARGIN_S = 4.0
#: Characters of a status; more than one line of a terminal is not read.
MAX_STATUS_CHARACTERS = 200

_MICROSECONDS = re.compile("[1-9][0-9]{0,18}")
_LEAVING = (Phase.DRAINING, Phase.STOPPED)


@attrs.frozen
class Situation:
    """What is told about."""

    phase: Phase
    healthy: bool
    #: What people see in ``systemctl status``.
    status: str

    @classmethod
    def of(cls, runtime: Runtime) -> Situation:
        """How things stand with the server."""
        if runtime.failure is not None:
            status = f"Failed: {runtime.failure}"
        elif runtime.phase is Phase.STARTING:
            status = "Loading the model"
        elif runtime.phase is Phase.READY and runtime.model is not None:
            status = f"Serving {runtime.model.names[0]}"
        elif runtime.phase is Phase.DRAINING:
            status = f"Draining, {runtime.live_requests} requests left"
        else:
            status = "Stopped"
        # One line: a line break would begin another word.
        one_line = " ".join(status.split())[:MAX_STATUS_CHARACTERS]
        return cls(runtime.phase, healthy=runtime.healthy, status=one_line)


def words(
    now: Situation, told: Situation | None, *, drain_s: float, watchdog: bool
) -> tuple[str, ...]:
    """What to say now, after ``told`` has been said.

    Args:
        now: How things stand.
        told: How they stood when something was last said; ``None`` before the first word.
        drain_s: Seconds in which a drain ends, from its beginning to the process's exit.
        watchdog: Whether somebody waits for signs of life.
    """
    said = []
    if now.phase is Phase.READY and (told is None or told.phase is Phase.STARTING):
        said.append("READY=1")
    if now.phase in _LEAVING and (told is None or told.phase not in _LEAVING):
        said += ["STOPPING=1", f"EXTEND_TIMEOUT_USEC={round(drain_s * 1e6)}"]
    if told is None or told.status != now.status:
        said.append(f"STATUS={now.status}")
    if watchdog and now.healthy:
        said.append("WATCHDOG=1")
    return tuple(said)


def watchdog_s(environ: Mapping[str, str], pid: int) -> float | None:
    """Seconds after which a silent process is killed; ``None`` where nobody watches this one."""
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    usec = environ.get("WATCHDOG_USEC", "")
    return int(usec) / 1e6 if _MICROSECONDS.fullmatch(usec) else None


@attrs.define(eq=False)
class Supervisor:
    """Who started us and wants to hear how we are."""

    #: A path, or ``@`` and the name of a socket in Linux's abstract namespace.
    address: str
    watchdog_s: float | None
    drain_timeout_s: float
    _told: Situation | None = attrs.field(default=None, init=False)
    _deaf: bool = attrs.field(default=False, init=False)

    @classmethod
    def found(cls, environ: Mapping[str, str], *, drain_timeout_s: float) -> Supervisor | None:
        """The one that the environment names, if any."""
        address = environ.get("NOTIFY_SOCKET", "")
        if not address:
            return None
        if address[0] not in "/@":
            logger.warning("NOTIFY_SOCKET is neither a path nor an abstract name: not used")
            return None
        return cls(address, watchdog_s(environ, os.getpid()), drain_timeout_s)

    @property
    def silence_s(self) -> float:
        """Seconds between two words, at most."""
        if self.watchdog_s is None:
            return LONGEST_SILENCE_S
        return max(SHORTEST_SILENCE_S, min(LONGEST_SILENCE_S, self.watchdog_s / 2))

    async def keep_told(self, runtime: Runtime) -> None:
        """Tell of the runtime until it has stopped."""
        await self._tell_until(runtime.wait_started, runtime)
        await self._tell_until(runtime.wait_stopped, runtime)
        self.tell(runtime)

    async def _tell_until(self, event: Callable[[], Awaitable[None]], runtime: Runtime) -> None:
        while True:
            self.tell(runtime)
            with trio.move_on_after(self.silence_s):
                await event()
                return

    def tell(self, runtime: Runtime) -> None:
        """Say what is new. Never blocks, never raises."""
        now = Situation.of(runtime)
        said = words(
            now,
            self._told,
            drain_s=self.drain_timeout_s + EXIT_MARGIN_S,
            watchdog=self.watchdog_s is not None,
        )
        if said and self._send("\n".join(said).encode(errors="replace")):
            self._told = now

    def _send(self, datagram: bytes) -> bool:
        name = "\0" + self.address[1:] if self.address[0] == "@" else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(datagram, socket.MSG_DONTWAIT, name)
        except OSError as error:
            if not self._deaf:
                logger.warning("the supervisor at NOTIFY_SOCKET is not told: %s", error)
            self._deaf = True
            return False
        self._deaf = False
        return True
