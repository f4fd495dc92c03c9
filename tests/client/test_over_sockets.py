"""The client over real sockets: connections that are used again, left, and cut."""

from __future__ import annotations

import gc
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from triolet.client import Ending, StreamCutError, UnreachableError, connect
from triolet.server.listen import ListenOptions, serve
from triolet.testing.asgi import open_server
from triolet.testing.engine import ScriptedBackend, say, serve_script

pytestmark = pytest.mark.live

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def listening(backend):
    listen = partial(serve, options=ListenOptions(port=0), shutdown_trigger=trio.sleep_forever)
    async with open_server(serve_script(backend)) as server, trio.open_nursery() as nursery:
        (url,) = await nursery.start(listen, server.client.app)
        async with connect(url) as client:
            yield client, server
        nursery.cancel_scope.cancel("the test is over")


async def all_free(server):
    with trio.fail_after(30):
        while server.runtime.live_requests:  # noqa: ASYNC110 - a socket tells, no event of ours
            # The server notices on a socket: no event of ours tells when.
            await trio.lowlevel.checkpoint()


@asynccontextmanager
async def saying(*pieces):
    """A server that answers every connection with these bytes and closes it."""
    connections = []

    async def answer(stream):
        connections.append(stream)
        async with stream:
            await stream.receive_some(65_536)
            for piece in pieces:
                await stream.send_all(piece)

    async with trio.open_nursery() as nursery:
        listen = partial(trio.serve_tcp, answer, 0, host="127.0.0.1")
        (listener,) = await nursery.start(listen)
        port = listener.socket.getsockname()[1]
        async with connect(f"http://127.0.0.1:{port}") as client:
            yield client
        nursery.cancel_scope.cancel("the test is over")


async def test_streams_are_whole_and_their_connection_is_used_again():
    async with listening(ScriptedBackend(say("Hello."))) as (client, _):
        for _ in range(3):
            async with client.chat("hi", model="scripted") as stream:
                assert await stream.text() == "Hello."
            assert stream.outcome.ending is Ending.DONE
        (connection,) = client._http._transport._pool.connections

    assert connection.info().endswith("Request Count: 3")


async def test_leaving_early_frees_the_request_and_leaves_nothing_for_the_collector():
    async with listening(ScriptedBackend(say(times=50), step_s=0.001)) as (client, server):
        async with client.chat("hi", model="scripted") as stream:
            async for event in stream:
                if event.number == 2:
                    break
        del stream, event
        gc.collect()  # a generator that was dropped where it stood would be a warning here
        await all_free(server)
        assert not client._http._transport._pool.connections


async def test_a_cancelled_reader_closes_its_connection():
    async with listening(ScriptedBackend(say(times=50), step_s=0.001)) as (client, server):
        async with trio.open_nursery() as nursery:

            async def read():
                async with client.chat("hi", model="scripted") as stream:
                    async for event in stream:
                        if event.number == 3:
                            nursery.cancel_scope.cancel("seen enough")

            nursery.start_soon(read)
        await all_free(server)


@pytest.mark.parametrize(
    ("pieces", "finished"),
    [
        ((HEAD, chunk(EVENT)), False),
        ((HEAD, chunk(EVENT)[:9]), False),
        ((HEAD, chunk(EVENT), b"0\r\n\r\n"), False),
    ],
    ids=["between chunks", "inside a chunk", "complete body without done"],
)
async def test_a_body_that_is_cut_anywhere_is_truncated(pieces, finished):
    async with saying(*pieces) as client, client.chat("hi", model="m") as stream:
        with pytest.raises(StreamCutError):
            await stream.text()

    assert stream.outcome.ending is Ending.TRUNCATED


async def test_done_and_a_cut_behind_it_is_done():
    async with (
        saying(HEAD, chunk(EVENT), chunk(DONE)) as client,
        client.chat("hi", model="m") as stream,
    ):
        assert await stream.text() == "a"

    assert stream.outcome.ending is Ending.DONE


async def test_a_read_is_what_the_server_wrote_at_once():
    async with (
        saying(HEAD + chunk(EVENT * 2) + chunk(EVENT), chunk(DONE)) as client,
        client.chat("hi", model="m") as stream,
    ):
        reads = [event.read async for event in stream]

    assert reads == [1, 1, 2]


async def test_a_server_that_hangs_up_without_a_word_is_unreachable():
    async with saying() as client:
        with pytest.raises(UnreachableError, match="disconnected without sending"):
            async with client.chat("hi", model="m"):
                pass
