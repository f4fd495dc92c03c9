"""Servers in processes of their own, and plain sockets to talk to them."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attrs
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Seconds for what takes one or two on a quiet machine: start, answer, stop.
PATIENCE_S = 60
#: Seconds for a model to load on two busy cores.
LOAD_PATIENCE_S = 240
#: What must be back at zero once no request is left.
HELD = (
    "triolet_requests_live",
    "triolet_engine_sequences_waiting",
    "triolet_engine_sequences_running",
    "triolet_engine_sequences_paused",
    "triolet_engine_kv_blocks_used",
    "triolet_engine_batch_rows_used",
)
SERVE = (sys.executable, "-m", "triolet", "serve", "--port", "0")
SCRIPTED = (*SERVE, "--engine", "scripted")
_LISTENING = re.compile(r"listening on (https?://\S+)|Running on (https?://\S+)")
_POLL_S = 0.02
#: l_onoff = 1, l_linger = 0: close sends a reset.
_RESET = struct.pack("ii", 1, 0)


def poll(condition: Callable[[], Any], what: str, *, within: float = PATIENCE_S) -> Any:
    """The first true value of ``condition``.

    Raises:
        TimeoutError: It had none for ``within`` seconds.
    """
    deadline = time.monotonic() + within
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {within} s")
        time.sleep(_POLL_S)
    return value


@attrs.frozen
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@attrs.define(eq=False)
class ServerProcess:
    process: subprocess.Popen[bytes]
    log_path: Path
    #: Empty until it listens.
    url: str = ""

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname, parts.port

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_listening(self, within: float = PATIENCE_S) -> None:
        def found() -> re.Match[str] | None:
            match = _LISTENING.search(self.log())
            if match is None and self.process.poll() is not None:
                raise AssertionError(f"exit {self.process.returncode}:\n{self.log()}")
            return match

        match = poll(found, "address", within=within)
        self.url = match[1] or match[2]

    def wait_ready(self, within: float = PATIENCE_S) -> None:
        poll(lambda: self.ask("GET", "/ready").status == 200, "readiness", within=within)

    def ask(self, method: str, path: str, body: object = None) -> Answer:
        """One request on a connection of its own."""
        connection = self._connection()
        try:
            headers = {"Content-Type": "application/json", "Connection": "close"}
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            named = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, named, response.read())
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self.url.startswith("http:"):
            return http.client.HTTPConnection(*self.address, timeout=PATIENCE_S)
        # A certificate of the test's own; who we talk to is no question here.
        trusting = ssl._create_unverified_context()
        return http.client.HTTPSConnection(*self.address, timeout=PATIENCE_S, context=trusting)

    def numbers(self) -> dict[str, float]:
        """The unlabelled samples of a scrape, and the requests ended by outcome."""
        families = text_string_to_metric_families(self.ask("GET", "/metrics").body.decode())
        return {
            sample.labels.get("outcome", sample.name): sample.value
            for family in families
            for sample in family.samples
            if not sample.labels or sample.name == "triolet_requests_total"
        }

    def held(self) -> dict[str, float]:
        """What the server holds, without the zeros."""
        numbers = self.numbers()
        return {name: numbers[name] for name in HELD if numbers[name]}

    def wait_free(self) -> None:
        poll(lambda: not self.held(), "return of all that requests held")

    def file_descriptors(self) -> int:
        """How many are open, without those of connections that are just being closed."""
        folder = Path(f"/proc/{self.process.pid}/fd")
        counts = []
        for _ in range(10):
            counts.append(len(list(folder.iterdir())))
            time.sleep(_POLL_S)
        return min(counts)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_exit(self, within: float = PATIENCE_S) -> int:
        return self.process.wait(within)


@contextmanager
def running(log_path: Path, command: tuple[str, ...], **env: str) -> Iterator[ServerProcess]:
    """A process that ends with the block, with all that it started."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRIOLET_")}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Its own group, so that nothing of it can be left behind.
            start_new_session=True,
            env={**clean, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env},
        )
    try:
        yield ServerProcess(process, log_path)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)


def connect(address: tuple[str, int], *, window: int | None = None) -> socket.socket:
    """A client's socket; ``window`` bytes of receive buffer make one that soon takes no more."""
    client = socket.socket()
    if window is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    client.settimeout(PATIENCE_S)
    client.connect(address)
    return client


def post(body: object, path: str = "/v1/completions") -> bytes:
    """The bytes of a request."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def read_to(client: socket.socket, mark: bytes) -> bytes:
    """What the client gets up to and including ``mark``, and whatever came with it."""
    received = b""
    while mark not in received:
        data = client.recv(65_536)
        assert data, f"the connection ended before {mark!r}: {received!r}"
        received += data
    return received


def read_to_end(client: socket.socket) -> bytes:
    """What the client gets up to the end of the connection."""
    received = b""
    while data := client.recv(65_536):
        received += data
    return received


def reset_on_close(sock: Any) -> None:
    """Let a close of this socket send RST in place of FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
