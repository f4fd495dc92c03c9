"""Listening, closing and failing, on sockets of this machine."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import asynccontextmanager, suppress

import attrs
import pytest
import trio
import trio.testing

from triolet.core import CancelCause
from triolet.errors import ConfigError, StartupError
from triolet.server import listen
from triolet.server.deadline_stream import RECORD_KEY, DeadlineStream
from triolet.server.listen import ListenOptions, serve

pytestmark = pytest.mark.live

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
START = {"type": "http.response.start", "status": 200, "headers": []}


@attrs.define(eq=False)
class Running:
    addresses: list[str]
    stop: trio.Event
    scope: trio.CancelScope
    returned: trio.Event

    @property
    def port(self):
        return int(self.addresses[0].rpartition(":")[2])

    async def connect(self):
        return await trio.open_tcp_stream("127.0.0.1", self.port)


class Announcement:
    """Takes the place of ``task_status``."""

    def __init__(self):
        self.made = trio.Event()
        self.addresses = []

    def started(self, addresses):
        self.addresses = addresses
        self.made.set()


@asynccontextmanager
async def running(app, *, trigger=None, **options):
    options = ListenOptions(**{"port": 0, **options})
    stop, returned, scope = trio.Event(), trio.Event(), trio.CancelScope()
    announcement = Announcement()

    async def server():
        with scope:
            await serve(
                app, options, shutdown_trigger=trigger or stop.wait, task_status=announcement
            )
        returned.set()

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server)
            await announcement.made.wait()
            yield Running(announcement.addresses, stop, scope, returned)
            stop.set()


def asgi(handle):
    """An app that completes its lifespan and gives everything else to ``handle``."""

    async def app(scope, receive, send):
        if scope["type"] != "lifespan":
            await handle(scope, receive, send)
            return
        for _ in range(2):
            message = await receive()
            await send({"type": message["type"] + ".complete"})

    return app


@asgi
async def hello(scope, receive, send):
    await send(START)
    await send({"type": "http.response.body", "body": b"hello", "more_body": False})


@asgi
async def silent(scope, receive, send):
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"port": 65_536},
        {"port": -1},
        {"send_timeout_s": 0},
        {"graceful_timeout_s": -1},
        {"max_connections": 0},
        {"certfile": "cert.pem"},
        {"keyfile": "key.pem"},
    ],
    ids=str,
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError):
        ListenOptions(**options)


async def test_it_serves_and_gives_out_its_address():
    async with running(hello) as server:
        assert server.addresses == [f"http://127.0.0.1:{server.port}"]
        async with await server.connect() as client:
            await client.send_all(GET)
            assert b"hello" in await client.receive_some()


async def test_a_busy_port_is_a_config_error_that_names_it():
    async with running(hello) as server:
        with pytest.raises(ConfigError, match=f"port {server.port} of 127.0.0.1: it is in use"):
            await serve(hello, ListenOptions(port=server.port), shutdown_trigger=server.stop.wait)


async def test_an_address_of_another_machine_is_a_config_error():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        await serve(
            hello, ListenOptions(host="192.0.2.1", port=0), shutdown_trigger=trio.sleep_forever
        )


async def test_a_missing_certificate_is_a_config_error(tmp_path):
    options = ListenOptions(port=0, certfile=tmp_path / "none.pem", keyfile=tmp_path / "key.pem")
    with pytest.raises(ConfigError, match=r"none\.pem"):
        await serve(hello, options, shutdown_trigger=trio.sleep_forever)


async def test_a_unix_socket_is_served_guarded_and_removed(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(path))
    async with running(hello, uds=path) as server:
        assert server.addresses == [f"unix:{path}"]
        async with await trio.open_unix_socket(os.fspath(path)) as client:
            await client.send_all(GET)
            assert b"hello" in await client.receive_some()
        with pytest.raises(ConfigError, match="in use"):
            await serve(hello, ListenOptions(uds=path), shutdown_trigger=server.stop.wait)
        async with await trio.open_unix_socket(os.fspath(path)) as client:
            await client.send_all(GET)
            assert b"hello" in await client.receive_some()
    assert not path.exists()


async def test_unix_connections_have_the_send_buffer_too(tmp_path, monkeypatch):
    accepted = []

    class Kept(DeadlineStream):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            accepted.append(self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))

    monkeypatch.setattr(listen, "DeadlineStream", Kept)
    path = tmp_path / "socket"
    async with (
        running(hello, uds=path, socket_send_buffer_bytes=50_000),
        await trio.open_unix_socket(os.fspath(path)) as client,
    ):
        await client.send_all(GET)
        assert b"hello" in await client.receive_some()
    assert accepted == [2 * 50_000]


async def test_a_connection_beyond_the_limit_is_reset_and_the_others_go_on(caplog):
    async with running(hello, max_connections=2) as server:
        async with await server.connect() as one, await server.connect() as two:
            for client in (one, two):
                await client.send_all(GET)
                assert b"hello" in await client.receive_some()
            for _ in range(3):
                # The reset may even overtake the kernel's own yes.
                with pytest.raises((trio.BrokenResourceError, OSError)):
                    async with await server.connect() as three:
                        await three.receive_some()
            await one.send_all(GET)
            assert b"hello" in await one.receive_some()
        await trio.testing.wait_all_tasks_blocked()
        async with await server.connect() as four:
            await four.send_all(GET)
            assert b"hello" in await four.receive_some()
    assert sum("refusing" in record.message for record in caplog.records) == 1


async def test_idle_connections_close_at_once_and_running_ones_get_the_graceful_time():
    release = trio.Event()

    @asgi
    async def app(scope, receive, send):
        await send(START)
        await release.wait()
        await send({"type": "http.response.body", "body": b"late", "more_body": False})

    async with (
        running(app, graceful_timeout_s=10) as server,
        await server.connect() as idle,
        await server.connect() as busy,
    ):
        await busy.send_all(GET)
        assert b"200" in await busy.receive_some()
        server.stop.set()
        assert await idle.receive_some() == b""
        assert not server.returned.is_set()
        with pytest.raises(OSError, match=r"refused|connect"):
            await server.connect()
        release.set()
        assert b"late" in await busy.receive_some()
        await server.returned.wait()


async def test_connections_are_served_while_the_shutdown_trigger_runs():
    drain, drained = trio.Event(), trio.Event()

    async def trigger():
        await drain.wait()
        await drained.wait()

    async with running(hello, trigger=trigger) as server:
        drain.set()
        async with await server.connect() as client:
            await client.send_all(GET)
            assert b"hello" in await client.receive_some()
        drained.set()


async def test_what_outlives_the_graceful_time_is_reset_and_the_app_learns_why():
    causes = []

    @asgi
    async def app(scope, receive, send):
        try:
            await trio.sleep_forever()
        finally:
            causes.append(scope["state"][RECORD_KEY].ended_by)

    async with running(app, graceful_timeout_s=0.05) as server, await server.connect() as client:
        await client.send_all(GET)
        await trio.testing.wait_all_tasks_blocked()
        server.stop.set()
        with pytest.raises(trio.BrokenResourceError):
            await client.receive_some()
        await server.returned.wait()
    assert causes == [CancelCause.SHUTDOWN]


async def test_cancelling_serve_closes_connections_at_once():
    async with running(silent, graceful_timeout_s=1000) as server, await server.connect() as client:
        await client.send_all(GET)
        await trio.testing.wait_all_tasks_blocked()
        server.scope.cancel()
        await server.returned.wait()
        with suppress(trio.BrokenResourceError):
            while await client.receive_some():
                pass


def crash_at_startup(scope, receive, send):
    raise RuntimeError("no model")


async def crash_after_the_message(scope, receive, send):
    await receive()
    raise RuntimeError("no model")


async def refuse_to_start(scope, receive, send):
    await receive()
    await send({"type": "lifespan.startup.failed", "message": "no model"})


@pytest.mark.parametrize("app", [crash_at_startup, crash_after_the_message, refuse_to_start])
async def test_a_failed_startup_raises_and_its_cause_is_logged(app, caplog):
    with pytest.raises(StartupError):
        await serve(app, ListenOptions(port=0), shutdown_trigger=trio.sleep_forever)
    assert "no model" in caplog.text


async def test_a_lifespan_that_crashes_while_serving_raises():
    crash = trio.Event()

    async def app(scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await crash.wait()
        raise RuntimeError("the engine died")

    with pytest.RaisesGroup(Exception, flatten_subgroups=True, allow_unwrapped=True) as caught:
        async with running(app):
            crash.set()
            await trio.sleep_forever()
    assert "the engine died" in str(caught.value.exceptions)


async def test_a_lifespan_that_fails_at_shutdown_raises():
    async def app(scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        raise RuntimeError("could not save the ledger")

    with pytest.RaisesGroup(Exception, flatten_subgroups=True, allow_unwrapped=True) as caught:
        async with running(app):
            pass
    assert "ledger" in str(caught.value) or "ledger" in str(caught.value.exceptions)


async def test_a_reset_by_the_client_disturbs_nobody():
    async with running(silent) as server, await server.connect() as client:
        for _ in range(20):
            other = await server.connect()
            await other.send_all(GET)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await other.aclose()
        await client.send_all(GET)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0.01) as scope:
            await client.receive_some()
        assert scope.cancelled_caught
