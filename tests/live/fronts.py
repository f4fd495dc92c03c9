"""The two ways to serve, as processes with small limits, and the clients that try them."""

from __future__ import annotations

import json
import ssl
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import h2.config
import h2.connection
import h2.events
import h2.settings
import trustme
from tests.live.processes import PATIENCE_S, SERVE, ServerProcess, connect, poll, post, running

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from pathlib import Path

SEND_TIMEOUT_S = 1
KEEP_ALIVE_TIMEOUT_S = 2
REQUEST_TIMEOUT_S = 6
STEP_S = 0.005
#: What a busy machine may add to any bound in seconds.
BUSY_S = 4

SETTINGS = {
    "TRIOLET_ENGINE": "scripted",
    # Twenty seconds of text: more than the request timeout allows.
    "TRIOLET_SCRIPTED_TEXT": "ab " * 1300,
    "TRIOLET_SCRIPTED_STEP_MS": str(STEP_S * 1000),
    "TRIOLET_SEND_TIMEOUT": str(SEND_TIMEOUT_S),
    "TRIOLET_SOCKET_SEND_BUFFER": "4096",
    "TRIOLET_MAX_STREAM_BUFFER": "8192",
    "TRIOLET_KEEP_ALIVE_TIMEOUT": str(KEEP_ALIVE_TIMEOUT_S),
    "TRIOLET_REQUEST_TIMEOUT": str(REQUEST_TIMEOUT_S),
    "TRIOLET_MAX_CONNECTIONS": "1200",
}
HYPERCORN = (
    sys.executable, "-m", "hypercorn", "--worker-class", "trio", "--bind", "127.0.0.1:0",
    "--keep-alive", str(KEEP_ALIVE_TIMEOUT_S), "--backlog", "1024", "triolet.asgi:app",
)  # fmt: skip
_CERTIFICATE_FLAGS = {
    SERVE: ("--ssl-certfile", "--ssl-keyfile"),
    HYPERCORN: ("--certfile", "--keyfile"),
}

STREAM = {"model": "scripted", "prompt": "hi", "stream": True, "max_tokens": 3900}
WHOLE = {**STREAM, "stream": False}
SHORT = {**STREAM, "max_tokens": 3}
FIRST = b'"text":"a"'
#: Bytes of a stuck client's receive buffer; the kernel makes a few packets of it.
SMALL_WINDOW = 2048


@attrs.frozen(eq=False)
class Front:
    """One way to serve, with and without TLS."""

    plain: ServerProcess
    tls: ServerProcess


@contextmanager
def serving(command: tuple[str, ...], folder: Path) -> Iterator[Front]:
    """A front, ready."""
    issued = trustme.CA().issue_cert("localhost")
    names = [str(folder / name) for name in ("cert.pem", "key.pem")]
    issued.cert_chain_pems[0].write_to_path(names[0])
    issued.private_key_pem.write_to_path(names[1])
    flags = _CERTIFICATE_FLAGS[command]
    secure = (*command, *(word for pair in zip(flags, names, strict=True) for word in pair))
    with ExitStack() as stack:
        front = Front(
            stack.enter_context(running(folder / "plain.log", command, **SETTINGS)),
            stack.enter_context(running(folder / "tls.log", secure, **SETTINGS)),
        )
        for server in (front.plain, front.tls):
            server.wait_listening()
            server.wait_ready()
        yield front


def ended(server: ServerProcess, before: dict[str, float]) -> dict[str, float]:
    """How requests ended since ``before``, by outcome."""
    now = server.numbers()
    outcomes = [name for name in now if ":" in name or name in {"finished", "failed", "rejected"}]
    counts = {name: now[name] - before.get(name, 0) for name in outcomes}
    return {name: count for name, count in counts.items() if count}


@contextmanager
def all_free(
    server: ServerProcess, outcomes: dict[str, float], *, within: float, after: float = 0
) -> Iterator[None]:
    """Once the block is over, all is free in so many seconds, and what began in it ended so."""
    before = server.numbers()
    yield
    start = time.monotonic()
    poll(lambda: not server.held(), "free blocks and rows", within=within + BUSY_S)
    assert time.monotonic() - start >= after
    assert ended(server, before) == outcomes


def all_at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that run in threads at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def connect_tls(
    address: tuple[str, int], *, window: int | None = None, alpn: str = "http/1.1"
) -> ssl.SSLSocket:
    """As :func:`connect`, with TLS that trusts anyone."""
    trusting = ssl._create_unverified_context()
    trusting.set_alpn_protocols([alpn])
    return trusting.wrap_socket(connect(address, window=window))


class Http2Client:
    """One HTTP/2 connection over a socket; ``window`` is what each stream may send unasked."""

    def __init__(self, sock: socket.socket, *, window: int = 2**24) -> None:
        self.socket = sock
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.h2.local_settings = h2.settings.Settings(
            client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
        )
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(2**24)

    def post(self, body: object, *, length: int | None = None) -> int:
        """Send a request. With a ``length``, its body is announced and owed."""
        data = json.dumps(body).encode()
        stream = self.request(
            "POST",
            "/v1/completions",
            ("content-type", "application/json"),
            ("content-length", str(len(data) if length is None else length)),
            end=False,
        )
        if length is None:
            self.h2.send_data(stream, data, end_stream=True)
            self.flush()
        return stream

    def request(self, method: str, path: str, *headers: tuple[str, str], end: bool = True) -> int:
        """Send the head of a request."""
        stream = self.h2.get_next_available_stream_id()
        named = {":method": method, ":path": path, ":scheme": "http", ":authority": "x"}
        self.h2.send_headers(stream, [*named.items(), *headers], end_stream=end)
        self.flush()
        return stream

    def flush(self) -> None:
        self.socket.sendall(self.h2.data_to_send())

    def answer(self, stream: int) -> tuple[int, bytes]:
        """Status and body of the whole response on a stream."""
        status, content = 0, b""
        while data := self.socket.recv(65_536):
            for event in self.h2.receive_data(data):
                if getattr(event, "stream_id", None) != stream:
                    continue
                if isinstance(event, h2.events.ResponseReceived):
                    status = int(dict(event.headers)[b":status"])
                elif isinstance(event, h2.events.DataReceived):
                    content += event.data
                elif isinstance(event, h2.events.StreamEnded):
                    self.flush()
                    return status, content
            self.flush()
        raise ConnectionError(f"the connection ended in the answer: {status} {content!r}")


def stuck_clients(front: Front, stack: ExitStack) -> list[ServerProcess]:
    """Three clients that ask for a stream and read nothing: HTTP/1.1, TLS, HTTP/2 over TLS.

    Returns:
        The server that each of them holds.
    """
    plain = stack.enter_context(connect(front.plain.address, window=SMALL_WINDOW))
    plain.sendall(post(STREAM))
    tls = stack.enter_context(connect_tls(front.tls.address, window=SMALL_WINDOW))
    tls.sendall(post(STREAM))
    sock = stack.enter_context(connect_tls(front.tls.address, window=SMALL_WINDOW, alpn="h2"))
    Http2Client(sock).post(STREAM)
    return [front.plain, front.tls]


def trickle(address: tuple[str, int], parts: list[bytes], *, every_s: float) -> tuple[float, bytes]:
    """Send the parts slowly until the server hangs up.

    Returns:
        After how many seconds it did, and what it said before.
    """
    start, received = time.monotonic(), b""
    with connect(address) as client:
        client.settimeout(every_s)
        for part in [*parts, *[b""] * int(PATIENCE_S / every_s)]:
            try:
                client.sendall(part)
                data = client.recv(65_536)
            except TimeoutError:
                continue
            except OSError:
                break
            if not data:
                break
            received += data
    return time.monotonic() - start, received
