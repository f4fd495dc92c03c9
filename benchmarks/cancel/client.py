"""A client on a raw socket, which reads as much as it is told and leaves when it is told."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

#: Longest wait for bytes of a server that computes a long prompt on a busy machine.
PATIENCE_S = 600.0
#: The least that the kernel lets a client have as receive buffer is about this.
SMALL_BUFFER = 2048


class UnexpectedError(Exception):
    """The server said something else than was asked for; the message has its first bytes."""


class Client:
    """One connection with one request on it."""

    def __init__(self, port: int, body: dict[str, object], *, small_buffer: bool = False) -> None:
        self.sock = socket.socket()
        if small_buffer:
            # Before connecting: the window is settled there.
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(("127.0.0.1", port))
        self.port: int = self.sock.getsockname()[1]
        payload = json.dumps(body).encode()
        self.sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(payload) + payload
        )
        self.said = bytearray()

    def events(self) -> int:
        """Events with text that were read."""
        return self.said.count(b'"content":"') + self.said.count(b'"content": "')

    def read_events(self, number: int) -> None:
        """Read until so many events are there.

        Raises:
            UnexpectedError: The answer ended before, or is none.
        """
        while self.events() < number:
            data = self.sock.recv(4096)
            if not data:
                raise UnexpectedError(self.said[:600].decode(errors="replace"))
            self.said += data

    def nothing_said(self) -> bool:
        """Whether no text has come; does not wait."""
        self.sock.setblocking(False)  # noqa: FBT003 - positional only
        with contextlib.suppress(BlockingIOError):
            self.said += self.sock.recv(65_536)
        return self.events() == 0

    def read_to_end(self) -> float:
        """Read until the server closes; when that was (``time.perf_counter()``)."""
        while data := self.sock.recv(65_536):
            self.said += data
        return time.perf_counter()

    def close(self) -> float:
        """Leave; when that was."""
        now = time.perf_counter()
        self.sock.close()
        return now


class Reader(threading.Thread):
    """Reads a client to its end beside everything else."""

    def __init__(self, client: Client) -> None:
        super().__init__(daemon=True)
        self.client = client
        #: When the server closed; ``None`` while it has not.
        self.ended: float | None = None

    def run(self) -> None:
        """Read."""
        self.ended = self.client.read_to_end()
