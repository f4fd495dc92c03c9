"""The one door between the runtime and whatever computes tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

if TYPE_CHECKING:
    from triolet.core import EngineRequest, EngineStatistics, RequestId, StepResult


class Backend(Protocol):
    """Computes tokens for requests: the in-process engine, a remote server, or a script.

    All methods but :meth:`run` are synchronous, never block and never raise for an id they
    do not know, so that they can be called from any cleanup. After ``abort(id)`` returns, at
    most one more :class:`~triolet.core.StepResult` may mention the id: the step in flight.
    """

    async def run(
        self,
        steps: trio.MemorySendChannel[StepResult],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Compute until cancelled; send one result per step and close ``steps`` on the way out.

        ``steps`` is bounded: where its reader lags, the backend waits and generates nothing.

        Raises:
            EngineDownError: The backend died; it takes the server down with it.
        """

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Ids are unique over the life of the backend."""

    def abort(self, request_id: RequestId) -> None:
        """Drop a request and free what it holds within one step. Idempotent, never lost."""

    def end_choice(self, request_id: RequestId, choice: int) -> None:
        """Drop one choice of a request, as :meth:`abort` drops all. Idempotent, never lost."""

    def pause(self, request_id: RequestId) -> None:
        """Generate no more tokens for this request until resumed. Idempotent."""

    def resume(self, request_id: RequestId) -> None:
        """Undo :meth:`pause`. Idempotent."""

    def statistics(self) -> EngineStatistics:
        """The newest snapshot of what the backend holds."""

    def healthy(self) -> bool:
        """Whether the backend still computes."""
