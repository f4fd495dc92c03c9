"""What can go wrong between a client and a server, as errors of Triolet's tree.

::

    TrioletError
    ├── UnreachableError        nobody answered
    ├── RefusedError            an answer came and it is no stream; ``status`` is the server's
    └── BrokenStreamError       a stream began and did not end well
        ├── StreamFailedError   the server said why, in an error event
        └── StreamCutError      the bytes ended before the stream did

``status``, ``code``, ``type`` and ``param`` are what the server said, where it said something,
in whichever of the usual shapes: see :func:`read_fault`.
"""

from __future__ import annotations

import json
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import attrs
import orjson

from triolet.errors import TrioletError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Characters of an answer that is no JSON which a message repeats.
SHOWN_CHARACTERS = 300

_HTTP_ERRORS = range(400, 600)


@attrs.frozen
class Fault:
    """What a server says went wrong. ``None`` is what it did not say."""

    message: str
    code: str | None = None
    type: str | None = None
    param: str | None = None
    #: An HTTP status that stands in the body, as it must in an error event.
    status: int | None = None


class UnreachableError(TrioletError):
    """No answer: the connection could not be made, or ended before the headers came."""

    code = "unreachable"
    type = "connection_error"


class RefusedError(TrioletError):
    """The server answered, and not with an event stream."""

    def __init__(
        self,
        fault: Fault,
        *,
        status: int,
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(fault.message, param=fault.param, retry_after_s=retry_after_s)
        self.request_id = request_id
        # The tree has one status and code for each class; here they are what the server said.
        self.status = status  # type: ignore[misc]
        self.code = fault.code or f"http_{status}"  # type: ignore[misc]
        self.type = fault.type or "server_error"  # type: ignore[misc]


class BrokenStreamError(TrioletError):
    """A stream began and did not end well. What came before was delivered."""


class StreamFailedError(BrokenStreamError):
    """The stream ended in an error event."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message, param=fault.param)
        # As above; without a status of its own the event is the server's failure.
        self.status = fault.status or 500  # type: ignore[misc]
        self.code = fault.code or "stream_error"  # type: ignore[misc]
        self.type = fault.type or "server_error"  # type: ignore[misc]


class StreamCutError(BrokenStreamError):
    """The bytes ended with neither ``[DONE]`` nor an error event."""

    code = "stream_truncated"
    type = "connection_error"


def read_json(text: str | bytes) -> object:
    """Parse JSON as other servers write it: NaN and lone surrogates included.

    Raises:
        ValueError: It is not even that.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


def read_fault(body: object) -> Fault | None:
    """What an error body says, or ``None`` where it is none.

    Known are OpenAI's ``{"error": {"message": …}}``, ``{"error": "text"}`` (Ollama, TGI),
    ``{"object": "error", "message": …}`` (older vLLM, SGLang), the flat ``{"type": "error",
    "message": …}`` of OpenAI's Responses, and FastAPI's ``{"detail": …}``.
    """
    if not isinstance(body, dict):
        return None
    error = body.get("error")
    if isinstance(error, str) and error:
        return _fault({**body, "message": error, "type": body.get("error_type")})
    if isinstance(error, dict) and error:
        return _fault(error)
    if body.get("object") == "error" or body.get("type") == "error":
        return _fault(body)
    detail = body.get("detail")
    if detail is not None and "choices" not in body:
        return Fault(detail if isinstance(detail, str) else json.dumps(detail))
    return None


def read_refusal(status: int, headers: Mapping[str, str], body: bytes) -> RefusedError:
    """Make the error of an answer that is no stream.

    Args:
        status: Of the answer.
        headers: Of the answer, looked up in lower case.
        body: As much of it as was read.
    """
    fault = None
    with suppress(ValueError):
        fault = read_fault(read_json(body))
    if fault is None:
        shown = body.decode("utf-8", "replace").strip()[:SHOWN_CHARACTERS]
        fault = Fault(f"The server answered with status {status}: {shown or 'an empty body'}")
    return RefusedError(
        fault,
        status=status,
        request_id=headers.get("x-request-id"),
        retry_after_s=read_retry_after(headers),
    )


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait before another try, by ``retry-after-ms`` or ``Retry-After``.

    A date is taken as seconds after the server's own ``Date``, so that no clock is read here.
    """
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name, "")
        try:
            seconds = float(text) * unit_s
        except ValueError:
            continue
        if 0 <= seconds < float("inf"):
            return seconds
    try:
        then = parsedate_to_datetime(headers["retry-after"])
        now = parsedate_to_datetime(headers["date"])
        return max(0.0, (then - now).total_seconds())
    except (KeyError, ValueError, TypeError):
        return None


def _fault(said: Mapping[str, object]) -> Fault:
    message, code = said.get("message"), said.get("code")
    kind, param = said.get("type"), said.get("param")
    status = next(
        (
            value
            for value in (said.get("status"), said.get("status_code"), code)
            if type(value) is int and value in _HTTP_ERRORS
        ),
        None,
    )
    return Fault(
        message if isinstance(message, str) and message else "The server gave no reason.",
        # vLLM and llama.cpp send the HTTP status as the code.
        code=str(code) if isinstance(code, str | int) and code != "" else None,
        type=kind if isinstance(kind, str) else None,
        param=param if isinstance(param, str) else None,
        status=status,
    )
