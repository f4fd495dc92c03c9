"""Bugs to plant: each breaks one rule in one place, and names the tests that answer for it."""

from __future__ import annotations

import attrs

STORMS = ("tests/faults/test_storms.py",)
CHECKPOINTS = ("tests/faults/test_every_checkpoint.py",)
SCOPES = ("tests/server/test_scopes.py",)
QUEUE = ("tests/server/test_queue.py",)
BRIDGE = ("tests/runtime/test_bridge.py",)
SCHEDULER = ("tests/engine/test_scheduler.py",)
CONNECTION = ("tests/server/test_connection.py",)


@attrs.frozen
class Mutant:
    """One planted bug."""

    name: str
    #: Below ``src``.
    file: str
    #: What is replaced, by what. It stands in the file once.
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, source: str) -> str:
        """The file with the bug in it.

        Raises:
            ValueError: The place is not there, or there more than once.
        """
        if source.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.file} has its place {source.count(self.old)} times"
            )
        return source.replace(self.old, self.new)


REQUEST = "triolet/runtime/request.py"
LIFECYCLE = "triolet/runtime/lifecycle.py"
EXCHANGE = "triolet/server/exchange.py"
EVENTS = "triolet/server/event_stream.py"
ABORT = "            self._backend.abort(self.engine_ids[prompt])\n"
RESUME = "                    self._backend.resume(self.engine_ids[prompt])\n"
DEADLINE = "            self.scope.deadline = self.deadline_s\n"

MUTANTS = (
    # Cancellation: one scope, one end.
    Mutant(
        "drop-an-abort",
        REQUEST,
        "        self._abort(self._output.prompts_in_engine)\n        self.state",
        "        self.state",
        SCOPES,
    ),
    Mutant(
        "drop-the-abort-after-a-stop-string",
        REQUEST,
        "        self._abort(self._output.prompts_to_abort)\n",
        "",
        STORMS,
    ),
    Mutant("abort-twice", REQUEST, ABORT, ABORT * 2, STORMS),
    Mutant(
        "swallow-cancelled",
        REQUEST,
        "        finally:\n            self._end()\n",
        "        except trio.Cancelled:\n            pass\n",
        SCOPES,
    ),
    Mutant(
        "the-last-cause-wins",
        REQUEST,
        "        if self.record is not None or self._cause is not None or self._output.ended:\n"
        "            return False\n",
        "        if self.record is not None or self._output.ended:\n            return False\n",
        CHECKPOINTS,
    ),
    Mutant(
        "the-end-is-not-said",
        REQUEST,
        "            self._close(self._cancelled_error())\n",
        "            self._output.fail(self._cancelled_error())\n",
        SCOPES,
    ),
    Mutant(
        "nobody-watches-for-the-client",
        EXCHANGE,
        "                    nursery.start_soon(self._watch, nursery.cancel_scope)\n",
        "",
        SCOPES,
    ),
    Mutant(
        "a-slow-client-counts-as-gone",
        EXCHANGE,
        'getattr(record, "ended_by", None) or CancelCause.DISCONNECT',
        "CancelCause.DISCONNECT",
        ("tests/testing/test_wire.py",),
    ),
    Mutant(
        "a-stop-string-ends-all-choices",
        REQUEST,
        "            self._backend.end_choice(self.engine_ids[prompt], choice)\n",
        "            self._backend.abort(self.engine_ids[prompt])\n",
        STORMS,
    ),
    # Deadlines and the queue.
    Mutant("no-deadline-once-it-runs", REQUEST, DEADLINE, "            pass\n", QUEUE),
    Mutant(
        "the-queue-has-no-deadline",
        REQUEST,
        "trio.CancelScope(deadline=min(self.deadline_s, self.queue_deadline_s))",
        "trio.CancelScope(deadline=self.deadline_s)",
        QUEUE,
    ),
    Mutant(
        "give-a-place-back-twice",
        LIFECYCLE,
        "        self._admission.leave(trio.current_time(), handle.engine_ids, handle.owner)\n",
        "        self._admission.leave(trio.current_time(), handle.engine_ids, handle.owner)\n" * 2,
        STORMS,
    ),
    Mutant(
        "many-prompts-give-one-place-back",
        LIFECYCLE,
        "handle.engine_ids, handle.owner)\n        write",
        "handle.engine_ids[:1], handle.owner)\n        write",
        STORMS,
    ),
    # Slow clients.
    Mutant("forget-to-resume", REQUEST, RESUME, "                    pass\n", SCOPES),
    Mutant(
        "forget-to-pause",
        REQUEST,
        "                    self._backend.pause(self.engine_ids[prompt])\n",
        "                    pass\n",
        SCOPES,
    ),
    Mutant(
        "tokens-that-nobody-takes-are-free",
        "triolet/stream/policy.py",
        " or self.tokens >= share * limit.tokens",
        "",
        ("tests/stream/test_policy.py",),
    ),
    Mutant(
        "a-send-has-no-deadline",
        "triolet/server/deadline_stream.py",
        "trio.move_on_after(self.send_timeout_s)",
        "trio.CancelScope()",
        CONNECTION,
    ),
    Mutant(
        "shutdown-waits-for-a-stuck-client",
        "triolet/server/listen.py",
        "            server.connections.abort_all()\n",
        "",
        ("tests/server/test_listen.py", "tests/live/test_hazards.py"),
    ),
    Mutant(
        "conflation-loses-text",
        "triolet/stream/log.py",
        "        entry.joined_text += text\n",
        '        entry.joined_text += text if len(entry.joined_text) < 9 else b""\n',
        ("tests/stream/test_log.py",),
    ),
    # What the client is told.
    Mutant(
        "done-after-an-error",
        EVENTS,
        "            yield error_event(event.error)\n            return\n",
        "            yield error_event(event.error)\n            yield DONE\n            return\n",
        SCOPES,
    ),
    Mutant(
        "a-cut-body-looks-whole",
        EVENTS,
        "more = not isinstance(terminal, Completed)",
        "more = not isinstance(terminal, Completed | Failed)",
        SCOPES,
    ),
    # Lifecycle.
    Mutant(
        "a-drain-cancels-nobody",
        LIFECYCLE,
        "                    handle.cancel(CancelCause.SHUTDOWN)\n",
        "                    pass\n",
        SCOPES,
    ),
    Mutant(
        "a-second-drain-is-ignored",
        LIFECYCLE,
        "            self._hurry.set()\n",
        "            pass\n",
        SCOPES,
    ),
    Mutant(
        "a-dead-engine-fails-nobody",
        LIFECYCLE,
        "            handle.fail(engine_down(), engine_id)\n",
        "            pass\n",
        SCOPES,
    ),
    # The engine and its thread.
    Mutant(
        "a-failed-step-tells-one-request",
        "triolet/engine/loop.py",
        "            failures += self._recover(plan)\n",
        "            failures += self._recover(plan)[:1]\n",
        STORMS,
    ),
    Mutant(
        "free-a-block-twice",
        "triolet/engine/blocks.py",
        "        unused = [block for block in blocks if not self._owners[block]]\n",
        "        unused = list(blocks)\n",
        ("tests/engine/test_blocks.py",),
    ),
    Mutant(
        "an-abort-drops-the-first-choice-only",
        "triolet/engine/scheduler.py",
        "                self._roster.remove(sequence)\n        return True",
        "                self._roster.remove(sequence)\n            break\n        return True",
        SCHEDULER,
    ),
    Mutant(
        "free-blocks-under-a-running-step",
        "triolet/engine/scheduler.py",
        "            if sequence in self._in_flight:\n"
        "                sequence.status = SequenceStatus.DOOMED\n",
        "            if False:\n                sequence.status = SequenceStatus.DOOMED\n",
        SCHEDULER,
    ),
    Mutant(
        "an-abort-overtakes-its-submission",
        "triolet/runtime/bridge.py",
        "        if self.submitted.pop(request_id, None) is None:\n",
        "        if request_id not in self.submitted:\n",
        BRIDGE,
    ),
    Mutant(
        "nobody-sees-a-step-hang",
        "triolet/runtime/bridge.py",
        "            if watched.stalled(self.stall_timeout_s):\n",
        "            if False:\n",
        BRIDGE,
    ),
)
