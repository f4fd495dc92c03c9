"""A client's machine that goes dark: no FIN, no RST, no answer. In networks of our own.

The test runs this file again inside a network namespace, with the client in a second one and a
cable between them. That takes Linux, iproute2 and the right to make namespaces; it is skipped
where one is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.live.fronts import BUSY_S, FIRST, STREAM, WHOLE, ended
from tests.live.processes import SCRIPTED, connect, poll, post, read_to, running

pytestmark = [pytest.mark.live, pytest.mark.slow]

SEND_TIMEOUT_S = 1
#: By how much the kernel's own deadline comes later, see triolet.server.sockets, and the probe
#: that finds it passed.
KERNEL_S = 5 + 1
#: For 8 KiB of small events to fill the socket's buffer.
FILL_S = 2
SERVER = (
    *SCRIPTED, "--send-timeout", str(SEND_TIMEOUT_S), "--socket-send-buffer", "4096",
    "--scripted-text", "ab " * 1300, "--scripted-step-ms", "10",
)  # fmt: skip
IN_A_NETWORK = ("unshare", "--map-root-user", "--net")
CABLE = "ip link add name here type veth peer name there"
SERVER_HOST, CLIENT_HOST = "192.0.2.1", "192.0.2.2"


def can_lay_cables():
    if not all(shutil.which(tool) for tool in ("unshare", "ip")):
        return False
    attempt = (*IN_A_NETWORK, *CABLE.split())
    return subprocess.run(attempt, check=False, capture_output=True).returncode == 0


def shell(*commands):
    for command in commands:
        subprocess.run(command.split(), check=True)


def test_clients_whose_machine_goes_dark(tmp_path):
    """One reads a stream, one waits for a whole answer. Nothing tells the server that they left.

    The stream ends with the send timeout once the socket's buffer is full, as a slow client. The
    other is found by the kernel's probes, as a disconnect, though nothing was to be sent to it.
    All that they held is free then.
    """
    if not can_lay_cables():
        pytest.skip("needs Linux network namespaces and iproute2")
    command = (*IN_A_NETWORK, sys.executable, "-m", "tests.live.test_unplugged", str(tmp_path))
    root = Path(__file__).parents[2]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["outcomes"] == {"cancelled:slow_client": 1, "cancelled:disconnect": 1}
    assert SEND_TIMEOUT_S < seen["slow_client"] < FILL_S + SEND_TIMEOUT_S + 2 + BUSY_S
    assert SEND_TIMEOUT_S < seen["disconnect"] < SEND_TIMEOUT_S + KERNEL_S + 2 + BUSY_S


def serve_and_look(folder):
    """In the first namespace: what became of the two, and when."""
    shell("ip link set lo up", CABLE)
    shell(f"ip addr add {SERVER_HOST}/24 dev here", "ip link set here up")
    seen = {}
    with running(Path(folder) / "log", (*SERVER, "--host", SERVER_HOST)) as server:
        server.wait_listening()
        server.wait_ready()
        before = server.numbers()
        with subprocess.Popen(
            ("unshare", "--net", sys.executable, "-m", __spec__.name, *map(str, server.address)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as client:
            assert client.stdout.readline() == "here\n"
            shell(f"ip link set there netns {client.pid}")
            client.stdin.write("cable\n")
            client.stdin.flush()
            assert client.stdout.readline() == "dark\n"
            start = time.monotonic()
            for cause in ("slow_client", "disconnect"):
                poll(lambda cause=cause: f"cancelled:{cause}" in server.log(), cause)
                seen[cause] = time.monotonic() - start
        server.wait_free()
        seen["outcomes"] = ended(server, before)
    return seen


def visit_and_go_dark(host, port):
    """In the second namespace: the two requests, a cut cable, and the end of all by ``kill -9``."""
    print("here", flush=True)  # noqa: T201 (for the first)
    sys.stdin.readline()
    shell(f"ip addr add {CLIENT_HOST}/24 dev there", "ip link set there up")
    with connect((host, port)) as whole, connect((host, port)) as stream:
        whole.sendall(post(WHOLE))
        stream.sendall(post(STREAM))
        read_to(stream, FIRST)
        shell("ip link set there down")
        print("dark", flush=True)  # noqa: T201 (for the first)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(json.dumps(serve_and_look(sys.argv[1])))  # noqa: T201 (what the test reads)
    else:
        visit_and_go_dark(sys.argv[1], int(sys.argv[2]))
