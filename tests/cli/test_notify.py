"""What a supervisor hears: the words, and the socket they go through."""

from __future__ import annotations

import os
import socket

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from triolet.cli.notify import LONGEST_SILENCE_S, Situation, Supervisor, watchdog_s, words
from triolet.core import ModelInfo
from triolet.errors import ModelLoadError
from triolet.runtime.lifecycle import Phase

MODEL = ModelInfo(
    names=("m\nREADY=0", "other"),
    max_model_len=1,
    vocab_size=1,
    eos_token_ids=frozenset(),
    created=0,
)
LIFE = (Phase.STARTING, Phase.READY, Phase.DRAINING, Phase.STOPPED)


@attrs.define(eq=False)
class FakeRuntime:
    """A runtime whose life the test leads."""

    phase: Phase = Phase.STARTING
    healthy: bool = True
    failure: Exception | None = None
    model: ModelInfo | None = None
    live_requests: int = 0
    started: trio.Event = attrs.field(factory=trio.Event)
    stopped: trio.Event = attrs.field(factory=trio.Event)

    async def wait_started(self):
        await self.started.wait()

    async def wait_stopped(self):
        await self.stopped.wait()


def situation(phase, *, healthy=True, status=""):
    return Situation(phase, healthy=healthy, status=status)


def said(now, told=None, *, watchdog=False):
    return words(now, told, drain_s=29.0, watchdog=watchdog)


# The words.


def test_a_life_is_told_word_by_word():
    starting, ready, draining, stopped = (situation(phase, status=phase.value) for phase in LIFE)
    assert said(starting) == ("STATUS=starting",)
    assert said(ready, starting) == ("READY=1", "STATUS=ready")
    assert said(draining, ready) == (
        "STOPPING=1",
        "EXTEND_TIMEOUT_USEC=29000000",
        "STATUS=draining",
    )
    assert said(stopped, draining) == ("STATUS=stopped",)


def test_a_stop_while_it_loads_is_told_and_never_ready():
    assert said(situation(Phase.STOPPED), situation(Phase.STARTING))[0] == "STOPPING=1"


@given(st.lists(st.tuples(st.sampled_from(LIFE), st.booleans(), st.sampled_from("ab")), max_size=8))
def test_whatever_could_be_said_when_each_word_is_said_once(moments):
    """Some datagrams are lost; phases only go forward."""
    told, heard = None, []
    for phase, arrives, status in sorted(moments, key=lambda moment: LIFE.index(moment[0])):
        now = situation(phase, status=status)
        new = said(now, told)
        if arrives:
            told = now
            heard += new
            assert said(now, told) == ()
    assert heard.count("READY=1") == any(
        phase is Phase.READY and arrives for phase, arrives, _ in moments
    )
    leaving = any(
        phase in {Phase.DRAINING, Phase.STOPPED} and heard_ for phase, heard_, _ in moments
    )
    assert heard.count("STOPPING=1") == leaving
    assert sum(word.startswith("EXTEND") for word in heard) == leaving


@pytest.mark.parametrize("phase", LIFE)
def test_signs_of_life_are_those_of_the_engine(phase):
    assert "WATCHDOG=1" in said(situation(phase), situation(phase), watchdog=True)
    assert said(situation(phase, healthy=False), situation(phase), watchdog=True) == ()
    assert said(situation(phase), situation(phase)) == ()


@pytest.mark.parametrize(
    ("runtime", "status"),
    [
        (FakeRuntime(), "Loading the model"),
        (FakeRuntime(Phase.READY, model=MODEL), "Serving m READY=0"),
        (FakeRuntime(Phase.DRAINING, live_requests=3), "Draining, 3 requests left"),
        (FakeRuntime(Phase.STOPPED), "Stopped"),
        (FakeRuntime(Phase.STOPPED, failure=ModelLoadError("No.\nREADY=1")), "Failed: No. READY=1"),
        (FakeRuntime(failure=RuntimeError("x" * 1000)), "Failed: " + "x" * 192),
    ],
)
def test_a_status_is_one_line(runtime, status):
    assert Situation.of(runtime).status == status


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "20000000"}, 20.0),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "7"}, 20.0),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": ""}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-1"}, None),
        ({"WATCHDOG_USEC": "٣"}, None),
        ({"WATCHDOG_USEC": "9" * 5000}, None),
    ],
)
def test_a_watchdog_counts_if_it_is_ours_and_a_number(environ, seconds):
    assert watchdog_s(environ, 7) == seconds


@pytest.mark.parametrize(
    ("watchdog", "silence"),
    [(None, LONGEST_SILENCE_S), (4.0, 2.0), (60.0, LONGEST_SILENCE_S), (1e-6, 0.05)],
)
def test_the_watchdog_hears_from_us_twice_in_its_time(watchdog, silence):
    assert Supervisor("@x", watchdog, 1.0).silence_s == silence


# The socket.


@pytest.fixture(params=["path", "abstract"])
def mailbox(request, tmp_path, monkeypatch):
    """A bound socket of a supervisor, and what it is called in the environment."""
    monkeypatch.chdir(tmp_path)
    path = f"{tmp_path}/notify"
    name = {"path": path, "abstract": f"\0triolet-test-{os.getpid()}"}[request.param]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(name)
        bound.settimeout(0)
        yield bound, name.replace("\0", "@")


def letters(bound):
    """All datagrams that have arrived, as lists of words."""
    got = []
    try:
        while True:
            got.append(bound.recv(4096).decode().split("\n"))
    except BlockingIOError:
        return got


def found(address, **environ):
    return Supervisor.found({"NOTIFY_SOCKET": address, **environ}, drain_timeout_s=25.0)


async def test_a_supervisor_hears_of_a_whole_life(mailbox, autojump_clock, nursery):
    bound, address = mailbox
    runtime = FakeRuntime()
    nursery.start_soon(found(address, WATCHDOG_USEC="4000000").keep_told, runtime)
    await trio.sleep(3)
    # At once, and after 2 s.
    assert letters(bound) == [["STATUS=Loading the model", "WATCHDOG=1"], ["WATCHDOG=1"]]
    runtime.phase, runtime.model = Phase.READY, MODEL
    runtime.started.set()
    await trio.sleep(0.001)
    assert letters(bound) == [["READY=1", "STATUS=Serving m READY=0", "WATCHDOG=1"]]
    runtime.healthy = False
    await trio.sleep(10)
    assert letters(bound) == []
    runtime.phase, runtime.failure = Phase.STOPPED, RuntimeError("dead")
    runtime.stopped.set()
    await trio.sleep(0.001)
    assert letters(bound) == [["STOPPING=1", "EXTEND_TIMEOUT_USEC=29000000", "STATUS=Failed: dead"]]


def test_what_was_not_heard_is_said_again_and_complained_of_once(tmp_path, caplog):
    path = tmp_path / "late"
    supervisor = found(str(path))
    runtime = FakeRuntime(Phase.READY, model=MODEL)
    supervisor.tell(runtime)
    supervisor.tell(runtime)
    assert len(caplog.records) == 1
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(path))
        bound.settimeout(0)
        supervisor.tell(runtime)
        supervisor.tell(runtime)
        assert letters(bound) == [["READY=1", "STATUS=Serving m READY=0"]]


def test_a_supervisor_that_does_not_read_cannot_block_us(mailbox):
    bound, address = mailbox
    supervisor = found(address)
    runtime = FakeRuntime(Phase.DRAINING)
    for runtime.live_requests in range(2000):
        supervisor.tell(runtime)
    assert len(letters(bound)) < 2000
    supervisor.tell(runtime)
    assert letters(bound) == [["STATUS=Draining, 1999 requests left"]]


def test_characters_that_no_datagram_can_hold_are_replaced(mailbox):
    bound, address = mailbox
    found(address).tell(FakeRuntime(failure=RuntimeError("\udcff")))
    assert letters(bound) == [["STATUS=Failed: ?"]]


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "relative"])
def test_no_supervisor_or_one_of_another_kind_is_not_told(address):
    assert found(address) is None
    assert Supervisor.found({}, drain_timeout_s=1.0) is None


@pytest.mark.parametrize("address", ["/" + "x" * 200, "@" + "x" * 200, "/dev/null"])
def test_an_address_that_cannot_be_used_harms_nobody(address):
    found(address).tell(FakeRuntime())
