"""Every kind of request, ended in every way at every one of its checkpoints.

Each case runs the whole server on a scripted engine in virtual time, from the start, once for
each place where any of its tasks can be interrupted. Whatever the place:

* the client that is still there gets a whole answer, or an error, never a cut that looks whole;
* there is one record, and its outcome is the request's own end or the one that came upon it,
  which takes effect without the passing of time;
* the engine was told to drop what it still held, once, and nothing else;
* no block, row, task, handle or log is left;
* the server answers the next request, or says why it does not.

By default a case takes at most :data:`RUNS` checkpoints, spread evenly over the run and shifted
by the case, so that together they cover the places all cases share. ``TRIOLET_EVERY_CHECKPOINT=1``
takes every one, in three orders of tasks; that takes some minutes.
"""

from __future__ import annotations

import json
import os
import zlib
from contextlib import suppress
from functools import partial

import attrs
import h2.events
import h2.exceptions
import pytest
import trio
from tests.server.connecting import H2Client
from tests.server.reading import events
from trio.testing import wait_all_tasks_blocked

from triolet.config import Config
from triolet.core import CancelCause
from triolet.errors import EngineDownError
from triolet.runtime.lifecycle import Phase
from triolet.testing.asgi import AsgiClient, open_server
from triolet.testing.checkpoints import at_checkpoint, count_checkpoints
from triolet.testing.engine import ScriptedBackend, say_each, serve_script
from triolet.testing.settled import CountingBackend, Witness
from triolet.testing.streams import Delay, Dribble, Stall
from triolet.testing.wire import open_wire
from triolet.testing.wire_client import http_request

# What they cover others do too, and being measured takes them twice the time.
pytestmark = pytest.mark.no_cover

FULL = os.environ.get("TRIOLET_EVERY_CHECKPOINT") == "1"
#: Checkpoints that a case takes by default, and the orders of tasks that a full sweep tries.
RUNS, SEEDS = 12, (0, 1, 2)
#: One after another, while a request runs for some 20 steps.
STEP_S = 0.01

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ASK = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
NEXT = {**ASK, "max_tokens": 2}


@attrs.frozen
class Kind:
    """One kind of request, and what becomes of it when nothing ends it."""

    body: dict
    path: str = CHAT
    headers: dict = attrs.field(factory=dict)
    says: tuple[str, ...] = ("one two",)
    engine: dict = attrs.field(factory=dict)
    config: dict = attrs.field(factory=dict)
    natural: str = "finished"
    #: Seconds between two reads.
    read_every_s: float = 0.0
    #: Another request has the only row until it ends.
    queued: bool = False
    #: The body comes in two pieces.
    upload: bool = False
    #: How often the engine is told to pause when nothing ends it, at least.
    pauses: int = 0


KINDS = {
    "streaming": Kind({**ASK, "stream": True}),
    "not streaming": Kind(ASK),
    "two prompts times two choices": Kind(
        {"model": "scripted", "prompt": ["ab", "cd"], "n": 2, "stream": True, "max_tokens": 9},
        path=COMPLETIONS,
        says=("one", "three"),
    ),
    "two prompts in one body": Kind(
        {"model": "scripted", "prompt": ["ab", "cd"], "n": 2, "max_tokens": 9},
        path=COMPLETIONS,
        says=("one", "three"),
    ),
    "stop string": Kind({**ASK, "stream": True, "stop": ["e t"]}),
    "choices that stop apart": Kind(
        {**ASK, "stream": True, "n": 3, "stop": ["top"]}, says=("stop", "go on", "now stop")
    ),
    "queued": Kind({**ASK, "stream": True}, queued=True, engine={"max_num_seqs": 1}),
    "chunked prefill": Kind(
        {**ASK, "stream": True, "messages": [{"role": "user", "content": "x" * 60}]},
        engine={"max_num_batched_tokens": 8},
        says=("ab",),
    ),
    "slow reader": Kind(
        {**ASK, "stream": True, "n": 2},
        config={"max_stream_buffer": 1500},
        read_every_s=0.2,
        pauses=1,
        says=("one two three",),
    ),
    "logprobs": Kind({**ASK, "stream": True, "logprobs": True, "top_logprobs": 2}),
    "uploaded in two pieces": Kind(ASK, upload=True, says=("ab",)),
    "refused": Kind({**ASK, "temperature": "hot"}, natural="rejected"),
    "past its deadline": Kind(
        {**ASK, "stream": True},
        headers={"X-Request-Timeout": "0.04"},
        natural="cancelled:timeout",
    ),
}


@attrs.define(eq=False)
class Mortal:
    """A scripted backend that can be killed."""

    inner: ScriptedBackend
    _life: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)

    def kill(self):
        self._life.cancel()

    async def run(self, steps, *, task_status):  # noqa: ASYNC128 - the inner one starts it
        with self._life:
            await self.inner.run(steps, task_status=task_status)
        raise EngineDownError("killed")

    def __getattr__(self, name):
        return getattr(self.inner, name)


@attrs.define(eq=False)
class Scene:
    """What an end can reach."""

    server: object
    engine: Mortal
    witness: Witness
    #: What the client talks over, and the tasks of the server's side of it.
    talk: object = None
    connections: object = None
    #: When the end came, in virtual time, and whether a request said that this is its end.
    fired_s: float | None = None
    claimed: bool = False
    #: Requests that are there besides.
    others: set = attrs.field(factory=set)
    #: When each record was written.
    recorded_s: dict = attrs.field(factory=dict)

    def handles(self):
        return set(self.server.runtime._handles.values())

    def fire(self, end):
        self.fired_s = trio.current_time()
        end(self)

    def watch_records(self):
        """Note the time of each."""
        books = self.server.runtime.on_record

        def keep(record):
            self.recorded_s[record.id] = trio.current_time()
            books(record)

        self.server.runtime.on_record = keep


def disconnect(scene):
    scene.talk.disconnect()


def client_cancel(scene):
    for handle in scene.handles():
        scene.claimed |= handle.cancel(CancelCause.CLIENT_CANCEL) and handle.id not in scene.others
    if not scene.claimed:
        scene.fired_s = None  # what is still read, or has ended, goes its own way


def cancel_and_disconnect(scene):
    client_cancel(scene)
    scene.talk.disconnect()
    scene.fired_s = trio.current_time()


def torn(scene):
    scene.connections.cancel_scope.cancel()


def drain(scene):
    scene.server.runtime.drain()
    scene.server.runtime.drain()


def death(scene):
    scene.engine.kill()


def reset(scene):
    scene.talk.reset()


def leave(scene):
    scene.talk.leave()


def reset_stream(scene):
    scene.talk.reset_stream()


def hang_up(scene):
    scene.connections.abort_all()


#: What ends a request, and the outcomes that it may then have besides its natural one.
ENDS = {
    disconnect: {"cancelled:disconnect"},
    client_cancel: {"cancelled:client_cancel"},
    cancel_and_disconnect: {"cancelled:client_cancel", "cancelled:disconnect"},
    torn: {"cancelled:disconnect"},
    drain: {"cancelled:shutdown", "rejected"},
    death: {"failed", "rejected"},
}
#: The same over the wire, where a request may never arrive.
WIRE_ENDS = {
    reset: {"cancelled:disconnect", None},
    leave: {"cancelled:disconnect", None},
    # While the body is read, an end is an end.
    hang_up: {"cancelled:shutdown", "cancelled:disconnect", None},
    drain: {"cancelled:shutdown", "rejected"},
}
HTTP2_ENDS = {end: WIRE_ENDS[end] for end in (reset, hang_up)} | {
    reset_stream: {"cancelled:disconnect", None}
}
#: The server as a whole, and not one request, is ended by these.
LAST = {drain, death}


async def read_to_the_end(kind, exchange):
    """What the client has of the response, read as fast as the kind says; None if it left."""
    body, status, more = b"", None, True
    while True:
        try:
            message = await exchange.next_message()
        except trio.EndOfChannel:
            break
        except trio.ClosedResourceError:
            return None
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if kind.read_every_s:
            await trio.sleep(kind.read_every_s)
    return status, body, not more


def check_answer(kind, answer):
    """A whole answer, or an error that nobody can take for one."""
    status, body, complete = answer
    assert status is not None, "no answer"
    if status != 200:
        assert complete
        assert json.loads(body)["error"]["code"]
    elif kind.body.get("stream"):
        *_, last = events(body)
        assert complete == (last == "[DONE]")
        assert complete or last["error"]["code"]
    else:
        assert complete
        assert json.loads(body)["choices"]


async def talk_asgi(kind, scene, watched):
    """Ask over ASGI and read the answer; under watch all the while."""
    async with trio.open_nursery() as scene.connections:
        client = AsgiClient(scene.server.client.app, scene.connections)
        with watched():
            sent = json.dumps(kind.body).encode()
            half = len(sent) // 2 if kind.upload else len(sent)
            scene.talk = client.start(
                "POST", kind.path, body=sent[:half], headers=kind.headers, more_body=kind.upload
            )
            if kind.upload:
                await trio.sleep(STEP_S)
                scene.talk.upload(sent[half:])
            answer = await read_to_the_end(kind, scene.talk)
            if answer is not None:
                check_answer(kind, answer)


async def talk_wire(kind, scene, watched):
    """The same through protocol code and connections, over a pipe that holds little."""
    sent = http_request("POST", kind.path, json_body=kind.body, headers=kind.headers)
    faults = [Dribble(128), Delay(kind.read_every_s / 4)] if kind.read_every_s else []
    async with open_wire(scene.server.client.app) as scene.connections:
        wire = scene.connections
        scene.talk = client = wire.connect(
            sending=[Stall(len(sent) - 20, STEP_S)] if kind.upload else [],
            receiving=faults,
            capacity_bytes=512,
        )
        with watched(), suppress(*GONE):
            await client.send(sent)
            response = await client.read_response()
            if response.complete:
                check_answer(kind, (response.status, response.body, True))
        client.leave()
        await wait_all_tasks_blocked()
        assert wire.open_connections == 0


@attrs.define(eq=False)
class Http2Talk:
    """One HTTP/2 stream and its connection."""

    client: object
    h2: H2Client
    stream_id: int

    def reset(self):
        self.client.reset()

    def reset_stream(self):
        with suppress(h2.exceptions.ProtocolError):  # not opened yet, or over
            self.h2.h2.reset_stream(self.stream_id)
            self.client.stream.stream.send_now(self.h2.h2.data_to_send())


async def talk_http2(kind, scene, watched):
    """The same over HTTP/2, with a window of a few events."""
    async with open_wire(scene.server.client.app) as scene.connections:
        wire = scene.connections
        client = wire.connect(capacity_bytes=2048)
        h2_client = H2Client(client.stream, window=600)
        stream_id = h2_client.h2.get_next_available_stream_id()
        scene.talk = Http2Talk(client, h2_client, stream_id)
        pseudo = {":method": "POST", ":path": kind.path, ":scheme": "http", ":authority": "x"}
        with watched(), suppress(*GONE, AssertionError):  # the client asserts that it goes on
            h2_client.h2.send_headers(stream_id, [*pseudo.items(), *kind.headers.items()])
            h2_client.h2.send_data(stream_id, json.dumps(kind.body).encode(), end_stream=True)
            # Who has reset its stream hears nothing more of it.
            with trio.move_on_after(20):
                await h2_client.until((h2.events.StreamEnded, h2.events.StreamReset))
        client.leave()
        await wait_all_tasks_blocked()
        assert wire.open_connections == 0


#: What reading and sending raise once a connection is over.
GONE = (trio.ClosedResourceError, trio.BrokenResourceError, trio.EndOfChannel)


async def play(kind, talk, end, may_become, checkpoints):
    """One run of the server: the request, its end, what is left, the next request."""
    engine = Mortal(
        ScriptedBackend(say_each(*kind.says), step_s=STEP_S, **{"max_num_seqs": 8, **kind.engine})
    )
    backend = CountingBackend(engine)
    served = attrs.evolve(serve_script(engine.inner), backend=backend)
    async with open_server(served, Config(**kind.config)) as server:
        scene = Scene(server, engine, Witness.of(server.runtime, backend))
        scene.watch_records()
        async with trio.open_nursery() as blockers:
            if kind.queued:
                blocker = AsgiClient(server.client.app, blockers).start(
                    "POST", CHAT, json_body={**ASK, "stream": True}
                )
                await blocker.next_body()
                scene.others = {handle.id for handle in scene.handles()}
                blockers.start_soon(read_to_the_end, kind, blocker)
            await talk(kind, scene, partial(checkpoints.watch, partial(scene.fire, end)))
        ended = checkpoints.fired is not None
        if ended and end in LAST:
            await server.runtime.wait_stopped()
        await scene.witness.expect_settled()
        check_records(kind, scene, may_become if ended else set())
        if not ended:
            assert backend.calls["pause"] >= kind.pauses, backend.calls
        await check_next(end, server, ended=ended)


def check_records(kind, scene, may_become):
    """One record, of an outcome that had a cause, and no later than its cause."""
    records = [record for record in scene.witness.records if record.id not in scene.others]
    assert len(records) <= 1, records
    if scene.claimed:
        may_become = {"cancelled:client_cancel"}
        assert records[0].outcome == "cancelled:client_cancel"
    assert (records[0].outcome if records else None) in {kind.natural} | may_become
    if scene.fired_s is not None:
        # What is half uploaded is turned away when the rest has come.
        slack_s = STEP_S if kind.upload else 0
        for record in records:
            assert scene.recorded_s[record.id] <= scene.fired_s + slack_s, "ended too late"


async def check_next(end, server, *, ended):
    response = await server.client.request("POST", CHAT, json_body=NEXT)
    if ended and end in LAST:
        assert server.runtime.phase is Phase.STOPPED
        assert response.status == 503
        assert response.json()["error"]["code"] == ("draining" if end is drain else "engine_down")
    else:
        assert response.status == 200
        assert response.json()["choices"][0]["finish_reason"] == "length"


def numbers_of(total, name):
    """The checkpoints that a case takes."""
    if FULL or total <= RUNS:
        return range(1, total + 1)
    stride = -(-total // RUNS)
    return range(1 + zlib.crc32(name.encode()) % stride, total + 1, stride)


def sweep(scenario, name):
    """Run a scenario ended at every checkpoint, or at those of the default budget."""
    for seed in SEEDS if FULL else SEEDS[:1]:
        total = count_checkpoints(scenario, seed=seed)
        assert total > 10
        for number in numbers_of(total, name):
            at_checkpoint(scenario, number, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_ended_wherever_leaves_nothing(kind, end):
    sweep(partial(play, KINDS[kind], talk_asgi, end, ENDS[end]), f"{kind} {end.__name__}")


@pytest.mark.slow
@pytest.mark.parametrize("end", WIRE_ENDS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("kind", [*KINDS][:: 1 if FULL else 2])
def test_so_does_what_is_ended_on_the_wire(kind, end):
    name = f"{kind} {end.__name__} on the wire"
    sweep(partial(play, KINDS[kind], talk_wire, end, WIRE_ENDS[end]), name)


@pytest.mark.slow
@pytest.mark.parametrize("end", HTTP2_ENDS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("kind", ["streaming", "not streaming", "queued"])
def test_so_does_what_is_ended_on_http2(kind, end):
    name = f"{kind} {end.__name__} on HTTP/2"
    sweep(partial(play, KINDS[kind], talk_http2, end, HTTP2_ENDS[end]), name)
