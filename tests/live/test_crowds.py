"""Many clients at once: idle, stuck, new, or gone in the same moment."""

from __future__ import annotations

import resource
import signal
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise

import pytest
from tests.live.fronts import (
    BUSY_S,
    FIRST,
    KEEP_ALIVE_TIMEOUT_S,
    SMALL_WINDOW,
    STREAM,
    all_at_once,
)
from tests.live.processes import connect, poll, post, read_to, read_to_end, reset_on_close

pytestmark = [pytest.mark.live, pytest.mark.slow]

IDLE = 1000
#: Descriptors for them on both sides, and for everything else.
DESCRIPTORS = 2 * IDLE + 500
#: What a test of gaps tries before it fails: a busy machine adds to gaps, never takes away.
ROUNDS = 5
#: A step of 20 ms, and half a millisecond of the event loop for the end of each of 200 requests.
FLOOD_S = 0.12


@contextmanager
def descriptors(count):
    """Room for so many in this process, if the machine allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"the machine allows {hard} file descriptors, this takes {count}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Watched:
    """A stream that is read as it comes, and how long it kept its reader waiting."""

    def __init__(self, address):
        self._client = connect(address)
        self._arrivals = []
        self._reader = threading.Thread(target=self._read)

    def __enter__(self):
        self._client.sendall(post(STREAM))
        read_to(self._client, FIRST)
        self._reader.start()
        return self

    def __exit__(self, *exc):
        self._client.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._client.close()

    def _read(self):
        with suppress(ConnectionError):
            while self._client.recv(65_536):
                self._arrivals.append(time.monotonic())

    def largest_gap(self, act, *, for_s):
        """The longest wait from when ``act`` begins until ``for_s`` seconds later."""
        start = time.monotonic()
        act()
        time.sleep(for_s)
        end = time.monotonic()
        inside = [at for at in list(self._arrivals) if start <= at <= end]
        return max(late - early for early, late in pairwise([start, *inside, end]))


def test_a_thousand_idle_connections(front):
    """A stream beside them goes on, new requests are answered, and all are hung up on in time."""
    server = front.plain
    with descriptors(DESCRIPTORS), ExitStack() as stack:
        beside = stack.enter_context(Watched(server.address))
        idle = [stack.enter_context(connect(server.address)) for _ in range(IDLE)]
        assert beside.largest_gap(lambda: None, for_s=1) < 0.5
        assert server.ask("GET", "/health").status == 200
        for client in idle:
            client.settimeout(KEEP_ALIVE_TIMEOUT_S + BUSY_S)
            assert client.recv(1) == b""
    poll(lambda: not server.held(), "free blocks")


@pytest.fixture
def steady(start_scripted):
    """Streams with 20 ms between two tokens, for longer than a test takes."""
    return start_scripted(
        "--scripted-text", "ab " * 1300, "--scripted-step-ms", "20", "--max-num-seqs", "512",
        "--max-num-batched-tokens", "2048",
    )  # fmt: skip


def test_a_flood_of_aborts_beside_a_running_stream(steady):
    """200 streams dropped in 10 ms hold another stream up for no longer than their ends take.

    All that they held is free by then, and each is one disconnect.
    """
    excess = []
    with Watched(steady.address) as beside:
        for _ in range(ROUNDS):
            clients = [connect(steady.address) for _ in range(200)]
            for client in clients:
                client.sendall(post(STREAM))
            for client in clients:
                read_to(client, FIRST)
            poll(lambda: steady.held().get("triolet_engine_sequences_running") == 201, "streams")
            for client in clients[::2]:
                reset_on_close(client)
            before = beside.largest_gap(lambda: None, for_s=0.5)

            def drop(clients=clients):
                for client in clients:
                    client.close()

            excess.append(beside.largest_gap(drop, for_s=0.5) - before)
            held = steady.held()
            assert held["triolet_requests_live"] == held["triolet_engine_sequences_running"] == 1
            if excess[-1] <= FLOOD_S:
                break
    assert min(excess) <= FLOOD_S, excess
    steady.wait_free()
    assert steady.numbers()["cancelled:disconnect"] == 200 * len(excess) + 1


def test_sigterm_with_fifty_streams_ten_of_them_stuck(start_scripted):
    """Exit 0 within the drain timeout and two seconds, whatever the ten do.

    Streams that end in time end well. The others that read get an error event and no success.
    The log has one record of each, and none is anything but finished or cancelled by shutdown.
    """
    server = start_scripted(
        "--drain-timeout", "2", "--send-timeout", "60", "--socket-send-buffer", "4096",
        "--max-stream-buffer", "8192", "--scripted-text", "ab " * 1300,
        "--scripted-step-ms", "10", "--max-num-seqs", "64",
    )  # fmt: skip
    long = {**STREAM, "logprobs": 5}
    kinds = {
        "stuck": [long] * 10,
        "short": [{**STREAM, "max_tokens": 60}] * 20,
        "long": [long] * 20,
    }
    with ExitStack() as stack:
        clients = {
            kind: [
                (stack.enter_context(connect(server.address, window=SMALL_WINDOW)), body)
                for body in bodies
            ]
            for kind, bodies in kinds.items()
        }
        for client, body in clients["stuck"]:
            client.sendall(post(body))
        poll(
            lambda: server.held().get("triolet_engine_sequences_paused") == 10,
            "stuck and paused clients",
        )
        readers = clients["short"] + clients["long"]
        for client, body in readers:
            client.sendall(post(body))
        poll(lambda: server.held().get("triolet_requests_live") == 50, "streams")
        server.signal(signal.SIGTERM)
        start = time.monotonic()
        received = all_at_once(*(lambda one=one: read_to_end(one) for one, _ in readers))
        assert server.wait_exit() == 0
        assert 2 <= time.monotonic() - start < 2 + 2 + BUSY_S
    for text in received[:20]:
        assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    for text in received[20:]:
        assert b'"code":"shutdown"' in text
        assert b"[DONE]" not in text
        assert not text.endswith(b"0\r\n\r\n")
    records = [line for line in server.log().splitlines() if "triolet.requests: " in line]
    assert sum(" finished" in record for record in records) == 20
    assert sum(" cancelled:shutdown" in record for record in records) == 30
    assert len(records) == 50
