"""Listening sockets and what their connections inherit."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import ExitStack

import pytest

from triolet.server.listen import ListenOptions
from triolet.server.sockets import open_listeners, url_of

pytestmark = pytest.mark.live


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are not inherited")
async def test_accepted_sockets_have_the_send_buffer_and_notice_dead_peers():
    options = ListenOptions(port=0, send_timeout_s=7, socket_send_buffer_bytes=50_000)
    (listener,) = await open_listeners(options)
    with listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * 50_000
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 12_000
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 7
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


async def test_any_send_timeout_is_one_that_the_kernel_takes():
    for seconds in (0.01, 2_000_000):
        (listener,) = await open_listeners(ListenOptions(port=0, send_timeout_s=seconds))
        listener.close()


async def test_a_listener_never_waits():
    (listener,) = await open_listeners(ListenOptions(port=0))
    with listener, pytest.raises(BlockingIOError):
        listener.accept()


async def test_a_listener_has_the_url_that_clients_use(tmp_path):
    with ExitStack() as stack:
        for options, start in (
            (ListenOptions(port=0), "https://127.0.0.1:"),
            (ListenOptions(port=0, host="::1"), "https://[::1]:"),
            (ListenOptions(uds=tmp_path / "socket"), f"unix:{tmp_path}/socket"),
        ):
            (listener,) = await open_listeners(options)
            stack.enter_context(listener)
            assert url_of(listener, "https").startswith(start)


async def test_a_dead_servers_unix_socket_is_replaced(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(path))
    (listener,) = await open_listeners(ListenOptions(uds=path))
    with listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(os.fspath(path))
