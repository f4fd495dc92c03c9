"""The clients, in processes of their own: healthy ones that read, stuck ones that do not.

``clients.py healthy PORT N`` and ``clients.py stuck PORT N`` open N streams, say ``open``, and
then answer each line on stdin with a line of JSON; at its end they close everything.
"""

from __future__ import annotations

import json
import select
import selectors
import socket
import sys
import time

import attrs

#: Tokens of an answer: more than anybody waits for.
LONG = 60_000
#: About the least that the kernel lets a client have as receive buffer.
SMALL_BUFFER = 2048


def request(fields: dict[str, object]) -> bytes:
    """A request for an endless stream."""
    body = json.dumps({
        "model": "scripted",
        "messages": [{"role": "user", "content": "Go on."}],
        "max_tokens": LONG,
        "stream": True,
        **fields,
    }).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d"
    return head % len(body) + b"\r\nContent-Type: application/json\r\n\r\n" + body


def connect(port: int, *, small_buffer: bool) -> socket.socket:
    """A connection, with a receive window that takes one event or two."""
    sock = socket.socket()
    if small_buffer:
        # Before connecting: the window is settled there.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    sock.settimeout(60.0)
    sock.connect(("127.0.0.1", port))
    return sock


def say(value: object) -> None:
    """A line to the one who started us."""
    print(json.dumps(value), flush=True)


@attrs.define
class Healthy:
    """Streams that are read at once; the gaps between their events."""

    gaps: list[float] = attrs.field(factory=list)
    last: dict[int, float] = attrs.field(factory=dict)

    def read(self, sock: socket.socket) -> None:
        """Take what there is. Events that come together have no gap between them.

        Raises:
            EOFError: The server ended the stream.
        """
        data = sock.recv(65_536)
        if not data:
            raise EOFError("a healthy stream ended")
        now = time.monotonic()
        number = data.count(b"data: ")
        if number:
            if sock.fileno() in self.last:
                self.gaps += [now - self.last[sock.fileno()], *(0.0 for _ in range(number - 1))]
            self.last[sock.fileno()] = now

    def told(self) -> list[float]:
        """All gaps since the last time."""
        gaps, self.gaps = self.gaps, []
        return gaps


def run_healthy(port: int, number: int) -> None:
    """Read ``number`` streams; each line on stdin is answered with the gaps since the last."""
    healthy = Healthy()
    with selectors.DefaultSelector() as selector:
        for _ in range(number):
            sock = connect(port, small_buffer=False)
            sock.sendall(request({}))
            selector.register(sock, selectors.EVENT_READ)
        while len(healthy.last) < number:
            for key, _ in selector.select():
                healthy.read(key.fileobj)
        selector.register(sys.stdin, selectors.EVENT_READ)
        say("open")
        while True:
            for key, _ in selector.select():
                if key.fileobj is not sys.stdin:
                    try:
                        healthy.read(key.fileobj)
                    except (EOFError, OSError):
                        # The server stops; who measured that asks for nothing more.
                        selector.unregister(key.fileobj)
                elif sys.stdin.readline():
                    say(healthy.told())
                else:
                    return


def run_stuck(port: int, number: int, fields: dict[str, object]) -> None:
    """Open ``number`` streams and read nothing.

    A line on stdin is answered with the streams that the server has ended: by the client's port,
    when (``time.monotonic()``). The kernel tells of an end without anything being read.
    """
    gone: dict[int, float] = {}
    open_sockets = {}
    with select.epoll() as poll:
        for _ in range(number):
            sock = connect(port, small_buffer=True)
            sock.sendall(request(fields))
            open_sockets[sock.fileno()] = (sock, sock.getsockname()[1])
            # No event asked for: errors and hang-ups are reported all the same.
            poll.register(sock.fileno(), 0)
        say([port for _, port in open_sockets.values()])
        poll.register(sys.stdin.fileno(), select.EPOLLIN)
        while True:
            for fileno, _ in poll.poll():
                if fileno in open_sockets:
                    sock, own_port = open_sockets.pop(fileno)
                    gone[own_port] = time.monotonic()
                    poll.unregister(fileno)
                    sock.close()
                elif sys.stdin.readline():
                    say(gone)
                else:
                    return


if __name__ == "__main__":
    kind, where, many, *rest = sys.argv[1:]
    if kind == "healthy":
        run_healthy(int(where), int(many))
    else:
        run_stuck(int(where), int(many), json.loads(rest[0]))
