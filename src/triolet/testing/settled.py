"""Whether a server at rest holds nothing any more, and ended everything once.

Use, with the backend of :mod:`triolet.testing.counting`::

    backend = CountingBackend(ScriptedBackend(say("hello")))
    async with open_server(attrs.evolve(serve_script(), backend=backend)) as server:
        witness = Witness.of(server.runtime, backend)
        ...  # requests, faults, clients that leave
        await witness.expect_settled()

The rules:

1. The engine holds no sequence, no row and no KV block; admission counts nobody.
2. No request's scope, handle or log is left, and no task that was not there before. They are
   counted as they are: nothing waits for the garbage collector.
3. Every request has exactly one record, with an outcome of the closed set, and one at most for
   each id.
4. What the record bills was said by the engine, and next to nothing was said besides: what
   nobody wants any more is not generated.
5. A request that the engine still held was aborted, once. One that it had ended by itself was
   not, as far as the runtime could know: what was still on its way to the runtime is excused.
   The same for single choices.
6. Undelivered output never grew beyond the bound and what one step adds to it. From the bound on
   a request was paused, and below half of it it was not.

Rules 5 and 6 are checked as it happens, at every step of the engine, the rest at rest.
"""

from __future__ import annotations

import gc
from collections import Counter
from typing import TYPE_CHECKING

import attrs
import trio
from trio.testing import wait_all_tasks_blocked

from triolet.core import CancelCause, RequestId
from triolet.runtime.lifecycle import STEP_CHANNEL_STEPS, Runtime
from triolet.runtime.record import RequestRecord
from triolet.runtime.request import RequestHandle
from triolet.stream.log import EVENT_COST_BYTES, LOGPROB_COST_BYTES, TOP_COST_BYTES, StreamLog
from triolet.testing.counting import CountingBackend, base_id

if TYPE_CHECKING:
    from triolet.core import EngineRequest

#: All ways in which a request can end.
OUTCOMES = frozenset({
    "finished",
    "rejected",
    "failed",
    *(f"cancelled:{cause.value}" for cause in CancelCause),
})

#: Ids that a choice may say when nobody wants more of it: those of the results that wait for the
#: runtime, of the one that it reads, and of the step under way.
_UNWANTED_IDS = STEP_CHANNEL_STEPS + 2

#: Text and id of one token, as the log counts them: at most four bytes of text for a byte.
_TOKEN_COST_BYTES = 12


@attrs.define(eq=False)
class Witness:
    """Has seen a server from its start and can say whether it keeps the rules."""

    runtime: Runtime
    backend: CountingBackend
    #: Every record so far, and by id the Trio time at which the last one was written.
    records: list[RequestRecord] = attrs.field(factory=list, init=False)
    recorded_s: dict[RequestId, float] = attrs.field(factory=dict, init=False)
    _broken: list[str] = attrs.field(factory=list, init=False)
    _peaks: dict[RequestId, int] = attrs.field(factory=dict, init=False)
    _tasks: int = attrs.field(init=False)
    _objects: int = attrs.field(init=False)

    @classmethod
    def of(cls, runtime: Runtime, backend: CountingBackend) -> Witness:
        """Begin to watch. Call it before the first request, from within Trio."""
        witness = cls(runtime, backend)
        books = runtime.on_record

        def keep(record: RequestRecord) -> None:
            witness.records.append(record)
            witness.recorded_s[record.id] = trio.current_time()
            books(record)

        runtime.on_record = keep
        backend.on_step = lambda _: witness._weigh()
        return witness

    def __attrs_post_init__(self) -> None:
        self._tasks = trio.lowlevel.current_statistics().tasks_living
        self._objects = _count_objects()

    async def expect_settled(self) -> None:
        """Wait until nothing happens without the passing of time, then check all rules.

        Raises:
            AssertionError: Rules are broken; the message has a line for each.
        """
        await wait_all_tasks_blocked()
        broken = self.broken()
        if broken:
            raise AssertionError("\n".join(("the server has not settled:", *broken)))

    def broken(self) -> list[str]:
        """The rules that do not hold now, a sentence each."""
        return [
            *self._held(),
            *self._left_over(),
            *self._recorded(),
            *self.backend.broken,
            *self.backend.left(),
            *self._broken,
        ]

    def _held(self) -> list[str]:
        statistics, runtime = self.backend.statistics(), self.runtime
        counts = {
            "live requests": runtime.live_requests,
            "queued requests": runtime.queued_requests,
            "queued tokens": runtime.queued_tokens,
        }
        if not self.backend.down:
            for name in ("waiting", "running", "paused", "used_rows", "used_blocks"):
                counts[name] = getattr(statistics, name)
        return [f"the server still holds {name}={count}" for name, count in counts.items() if count]

    def _left_over(self) -> list[str]:
        broken = []
        tasks = trio.lowlevel.current_statistics().tasks_living
        if tasks > self._tasks:
            broken.append(f"{tasks - self._tasks} tasks are left")
        left = _count_objects() - self._objects
        if left > 0:
            broken.append(f"{left} handles and logs are left")
        return broken

    def _recorded(self) -> list[str]:
        broken = []
        counts = Counter(record.id for record in self.records)
        broken += [f"{id_} has {count} records" for id_, count in counts.items() if count > 1]
        submitted: dict[RequestId, list[EngineRequest]] = {}
        for request in self.backend.submitted:
            submitted.setdefault(base_id(request.id), []).append(request)
        broken += [f"{id_} has no record" for id_ in submitted if id_ not in counts]
        for record in self.records:
            if record.outcome not in OUTCOMES:
                broken.append(f"{record.id} has the outcome {record.outcome!r}")
            requests = submitted.get(record.id, [])
            said = sum(self.backend.said(request.id) for request in requests)
            billed = record.usage.output_tokens
            if billed > said:
                broken.append(f"{record.id} is billed {billed} tokens of {said} that were said")
            unwanted = said - billed
            if unwanted > _UNWANTED_IDS * sum(request.n for request in requests):
                broken.append(f"{record.id}: {unwanted} tokens were said that nobody wanted")
            if requests and record.usage.prompt_tokens != sum(len(r.prompt_ids) for r in requests):
                broken.append(f"{record.id} is billed {record.usage.prompt_tokens} prompt tokens")
        return broken

    def _weigh(self) -> None:
        """Look at what every stream has undelivered."""
        limit, limit_tokens = (
            self.runtime.max_undelivered_bytes,
            self.runtime.max_undelivered_tokens,
        )
        for handle in set(self.runtime._handles.values()):  # noqa: SLF001 - nothing public has it
            log = handle._hub.log  # noqa: SLF001 - as above
            peak = log.peak_bytes
            if peak > self._peaks.get(handle.id, limit):
                self._peaks[handle.id] = peak
                allowed = limit + self._step_bytes(handle)
                if peak > allowed:
                    self._broken.append(f"{handle.id} had {peak} undelivered bytes of {allowed}")
            if handle.scope.cancel_called:
                continue
            # Of the two bounds, the one that is nearer.
            share = max(log.undelivered_bytes / limit, log.undelivered_tokens / limit_tokens)
            for engine_id in filter(self.backend.holds, handle.engine_ids):
                paused = self.backend.is_paused(engine_id)
                if (share >= 1 and not paused) or (2 * share < 1 and paused):
                    state = "paused" if paused else "not paused"
                    self._broken.append(f"{engine_id} is {state} at {share:.0%} of its bound")

    def _step_bytes(self, handle: RequestHandle) -> int:
        """What one step adds at most: for each choice a new delta of one token and its finish.

        The prompt's scores come at once, and admission bounds them.
        """
        total = EVENT_COST_BYTES
        for engine_id in handle.engine_ids:
            request = self.backend.request(engine_id)
            sampling = request.sampling
            token = _TOKEN_COST_BYTES
            if sampling.logprobs is not None:
                token += LOGPROB_COST_BYTES + TOP_COST_BYTES * sampling.logprobs
            total += request.n * (2 * EVENT_COST_BYTES + token)
            if sampling.prompt_logprobs is not None:
                scored = LOGPROB_COST_BYTES + TOP_COST_BYTES * sampling.prompt_logprobs
                total += EVENT_COST_BYTES + len(request.prompt_ids) * scored
        return total


def _count_objects() -> int:
    """Handles and logs that exist in this process, whoever holds them."""
    # Not isinstance: it asks objects for their class, and some of strangers answer with a warning.
    return sum(type(found) in (RequestHandle, StreamLog) for found in gc.get_objects())
