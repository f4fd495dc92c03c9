"""The states in which a client leaves, each a function that brings a server there and watches.

A state returns the :class:`~clock.Stop` counted from the client's close, but for three: *queued*
counts from the end of the last request that had a slot, for until then the server is busy with
others; *never closes* counts from the last byte that the client read; and *control*, where nobody
leaves, from the end of the answer.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable
from http.client import HTTPConnection

import attrs
from clock import Stop, TreeClock, watch

from client import Client, Reader, UnexpectedError
from contenders import Contender
from serving import parse_metrics, send_queues

#: Processor seconds after which a server is surely in the middle of a prompt, or of an answer.
INTO_WORK_S = 0.7
#: A client that has queued has been seen by the server after this.
QUEUED_FOR_S = 0.5
#: A decode step of the slowest server.
ABOUT_A_STEP_S = 0.1
#: Of an answer that is read to its end.
CONTROL_TOKENS = 20
_FILLER = "the cat sat on the mat and the dog lay by the door "
_FILLER_TOKENS = 12
_number = itertools.count(int(time.time()) % 100_000)


@attrs.define(eq=False)
class Bench:
    """A running server with its clock, and what is asked of it."""

    contender: Contender
    port: int
    clock: TreeClock
    idle: float
    options: argparse.Namespace
    #: What a state has to say beside its figure.
    notes: list[str] = attrs.field(factory=list)
    #: Called when a client has left: sees the server's own numbers instead of its clock.
    watcher: Callable[[float], Stop] | None = None
    #: Engine steps that ended while the watcher looked at the server's own numbers.
    steps: int = 0

    def short(self) -> str:
        """A prompt of its own: no cache of prefixes knows it."""
        return f"{next(_number)} is a number. Count up from it for as long as you can."

    def long(self) -> str:
        """A prompt of about ``--prompt-tokens``."""
        times = self.options.prompt_tokens // _FILLER_TOKENS
        return f"{next(_number)} is a number. {_FILLER * times} Count up from that number."

    def client(
        self,
        text: str,
        *,
        tokens: int | None = None,
        stream: bool = True,
        large: bool = False,
        small_buffer: bool = False,
    ) -> Client:
        """Send a request."""
        tokens = self.options.tokens if tokens is None else tokens
        body = self.contender.body(text, tokens, stream=stream, large=large)
        return Client(self.port, body, small_buffer=small_buffer)

    def watch(self, since: float) -> Stop:
        """See when the server stops."""
        if self.watcher is not None:
            return self.watcher(since)
        return watch(self.clock, self.idle, self.options.patience, since=since)

    def wait_for_work(self) -> None:
        """Return when the server has computed for a while."""
        before = self.clock.read()
        while self.clock.read() - before < INTO_WORK_S:
            time.sleep(0.003)


def finished(bench: Bench) -> Stop:
    """Nobody leaves: the answer is read to its end. What a server does after that is its habit."""
    client = bench.client(bench.short(), tokens=CONTROL_TOKENS)
    return bench.watch(client.read_to_end())


def queued(bench: Bench) -> Stop:
    """The client leaves while others have all slots; they end by themselves."""
    tokens = bench.options.occupant_tokens
    readers = []
    for _ in range(bench.contender.slots):
        client = bench.client(bench.short(), tokens=tokens)
        client.read_events(1)
        readers.append(Reader(client))
        readers[-1].start()
    victim = bench.client(bench.long())
    time.sleep(QUEUED_FOR_S)
    if not victim.nothing_said():
        raise UnexpectedError("there was a slot for the client that should wait")
    left = victim.close()
    if bench.watcher is not None:
        stop = bench.watcher(left)
        for reader in readers:
            reader.join()
        return stop
    for reader in readers:
        reader.join()
    ends = [reader.ended for reader in readers if reader.ended is not None]
    if len(ends) < len(readers) or min(ends) < left:
        raise UnexpectedError("a slot was free too soon; raise --occupant-tokens")
    return bench.watch(max(ends))


def prefill(bench: Bench) -> Stop:
    """The client leaves in the middle of its long prompt."""
    client = bench.client(bench.long())
    bench.wait_for_work()
    if not client.nothing_said():
        raise UnexpectedError("the prompt was done too soon; raise --prompt-tokens")
    return bench.watch(client.close())


def decoding(bench: Bench) -> Stop:
    """The client leaves in the middle of a stream that it reads."""
    client = bench.client(bench.short())
    client.read_events(5)
    # Not always at the same place of a step.
    time.sleep(random.uniform(0, ABOUT_A_STEP_S))
    return bench.watch(client.close())


def not_streamed(bench: Bench) -> Stop:
    """The client leaves while it waits for a whole answer."""
    client = bench.client(bench.short(), stream=False)
    bench.wait_for_work()
    return bench.watch(client.close())


def stuck(bench: Bench) -> Stop:
    """The client stops reading, and leaves ``--stuck-for`` seconds later."""
    client = stop_reading(bench)
    time.sleep(bench.options.stuck_for)
    spent, began = bench.clock.read(), time.perf_counter()
    if queue_stands_still(bench, client):
        bench.notes.append("send stuck at close")
    share = (bench.clock.read() - spent) / (time.perf_counter() - began)
    bench.notes.append(f"{share:.2f} cores before it")
    return bench.watch(client.close())


def never_closes(bench: Bench) -> Stop:
    """The client stops reading and stays."""
    client = stop_reading(bench)
    stop = bench.watch(time.perf_counter())
    client.close()
    return stop


def stop_reading(bench: Bench) -> Client:
    """A client with a small window and large events that has read a few."""
    client = bench.client(bench.short(), large=True, small_buffer=True)
    client.read_events(2)
    return client


def queue_stands_still(bench: Bench, client: Client) -> bool:
    """Whether the server's kernel holds bytes for the client and takes no more."""
    before = send_queues(bench.port).get(client.port, 0)
    time.sleep(0.5)
    return before > 0 and send_queues(bench.port).get(client.port, 0) == before


STATES: dict[str, Callable[[Bench], Stop]] = {
    "control: read to the end": finished,
    "queued": queued,
    "in a long prefill": prefill,
    "decoding": decoding,
    "decoding, not streamed": not_streamed,
    "stuck send, then closed": stuck,
    "stuck send, never closed": never_closes,
}


def own_numbers(bench: Bench, *, waiting: bool) -> Callable[[float], Stop]:
    """A watcher of Triolet's metrics instead of its clock.

    Args:
        bench: The server, idle.
        waiting: Wait for the queue to be empty, else for all blocks to be free.
    """
    name = "triolet_engine_sequences_waiting" if waiting else "triolet_engine_kv_blocks_used"
    # Kept open: a new connection for each look would wait for the server to accept it.
    connection = HTTPConnection("127.0.0.1", bench.port)

    def look() -> dict[str, float]:
        connection.request("GET", "/metrics")
        return parse_metrics(connection.getresponse().read().decode())

    held = look()[name]

    def watcher(since: float) -> Stop:
        first = None
        while True:
            told = look()
            now, step = told[name], told["triolet_engine_steps_total"]
            first = step if first is None else first
            bench.steps = int(step - first)
            passed = time.perf_counter() - since
            if now <= held or passed > bench.options.patience:
                return Stop(passed, 0.0, ran_on=now > held)

    return watcher
