"""Server-sent events, both directions, without I/O.

Writing is two constants and one function: the default wire has ``data:`` lines and single-line
comments and nothing else, because widely used clients lose tokens over anything more.

Reading follows the WHATWG HTML standard, section 9.2.6, byte by byte: :class:`SseDecoder` gives
the same events however the bytes are cut.

- A line ends at LF, CR or CRLF. A CR ends its line at once; an LF right after it is skipped.
- A blank line dispatches the event if it has a ``data`` line, be it an empty one.
- ``id`` holds for its event and all later ones, until another replaces it. It counts from the
  blank line on: a client that resumes must not name an event that it saw half of.
- ``:`` opens a comment. Unknown fields are ignored. A leading byte order mark is dropped.
- What follows the last blank line is no event; :meth:`SseDecoder.finish` tells whether there
  was some.
"""

from __future__ import annotations

import re

import attrs

from triolet.errors import TrioletError

#: The last event of a stream that succeeded, and of no other.
DONE = b"data: [DONE]\n\n"

#: Sent in silence. One line and one LF: with a blank line after it, clients that remember an
#: earlier ``id`` make an empty event of it and fail.
KEEPALIVE = b": keep-alive\n"

#: One line of a server that we do not control. A chunk is below 1 KiB; a whole response that is
#: sent as one event (``response.completed``) is far below this.
MAX_LINE_BYTES = 16 * 1024 * 1024
#: All ``data`` lines of one event together.
MAX_EVENT_BYTES = 16 * 1024 * 1024

#: Milliseconds; longer numbers of a ``retry`` line are nonsense (and slow to convert).
_MAX_RETRY_DIGITS = 12

_LINE_END = re.compile(rb"\r\n?|\n")
_BOM = b"\xef\xbb\xbf"


class EventTooLargeError(TrioletError):
    """A line or an event exceeds what the decoder is allowed to hold."""

    code = "event_too_large"


@attrs.frozen
class SseEvent:
    """One dispatched event."""

    data: str
    type: str = "message"
    #: The last ``id`` seen up to this event, empty where there was none.
    id: str = ""


def encode_data(payload: bytes) -> bytes:
    """Write one event.

    Args:
        payload: One line of UTF-8, as :func:`~triolet.wire.codec.encode` gives it.

    Raises:
        ValueError: The payload is empty (clients fail on empty events) or has line ends.
    """
    if not payload or b"\n" in payload or b"\r" in payload:
        raise ValueError("the data of an event must be one line, and not empty")
    return b"data: %b\n\n" % payload


@attrs.define(eq=False)
class SseDecoder:
    """Bytes in, events out; holds at most one line and one event."""

    max_line_bytes: int = MAX_LINE_BYTES
    max_event_bytes: int = MAX_EVENT_BYTES
    #: The id to resume after: of the last event that was complete.
    last_event_id: str = attrs.field(default="", init=False)
    #: Milliseconds that the server asks to wait before reconnecting.
    retry_ms: int | None = attrs.field(default=None, init=False)
    #: Comment lines seen so far, keep-alives among them.
    comments: int = attrs.field(default=0, init=False)
    _line: bytearray = attrs.field(factory=bytearray, init=False, repr=False)
    _data: list[str] = attrs.field(factory=list, init=False, repr=False)
    _data_bytes: int = attrs.field(default=0, init=False)
    _type: str = attrs.field(default="", init=False)
    _id: str = attrs.field(default="", init=False)
    #: A field of an event has come, and no blank line yet.
    _open: bool = attrs.field(default=False, init=False)
    _after_cr: bool = attrs.field(default=False, init=False)
    _at_start: bool = attrs.field(default=True, init=False)
    _too_large: bool = attrs.field(default=False, init=False)

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Take the next bytes and return the events that they complete.

        Raises:
            EventTooLargeError: A line or event exceeds its limit; the decoder stays unusable.
        """
        if self._too_large:
            raise self._overflow()
        start = 0
        if self._after_cr and chunk:
            start = 1 if chunk.startswith(b"\n") else 0
            self._after_cr = False
        events: list[SseEvent] = []
        for end in _LINE_END.finditer(chunk, start):
            self._extend(chunk, start, end.start())
            event = self._end_line()
            if event is not None:
                events.append(event)
            start = end.end()
        self._extend(chunk, start, len(chunk))
        if chunk.endswith(b"\r"):
            self._after_cr = True
        return events

    def finish(self) -> bool:
        """Take the end of the stream; return whether it cut an event or a line."""
        return self._open or bool(self._line)

    def _extend(self, chunk: bytes, start: int, end: int) -> None:
        if len(self._line) + end - start > self.max_line_bytes:
            raise self._overflow()
        self._line += chunk[start:end]

    def _end_line(self) -> SseEvent | None:
        raw = bytes(self._line)
        self._line.clear()
        if self._at_start:
            self._at_start = False
            raw = raw.removeprefix(_BOM)
        if not raw:
            return self._dispatch()
        if raw.startswith(b":"):
            self.comments += 1
            return None
        # Cutting at ASCII bytes cannot cut a character, so a line decodes as the stream would.
        name, _, value = raw.decode("utf-8", "replace").partition(":")
        self._take_field(name, value.removeprefix(" "), len(raw))
        return None

    def _take_field(self, name: str, value: str, size: int) -> None:
        match name:
            case "data":
                self._data_bytes += size
                if self._data_bytes > self.max_event_bytes:
                    raise self._overflow()
                self._data.append(value)
            case "event":
                self._type = value
            case "id":
                if "\0" not in value:
                    self._id = value
            case "retry":
                if value.isascii() and value.isdigit() and len(value) <= _MAX_RETRY_DIGITS:
                    self.retry_ms = int(value)
                return
            case _:
                return
        self._open = True

    def _dispatch(self) -> SseEvent | None:
        lines, kind = self._data, self._type
        self._data = []
        self._data_bytes = 0
        self._type = ""
        self._open = False
        self.last_event_id = self._id
        return SseEvent("\n".join(lines), kind or "message", self._id) if lines else None

    def _overflow(self) -> EventTooLargeError:
        self._too_large = True
        self._line.clear()
        self._data.clear()
        return EventTooLargeError(
            f"The stream has a line over {self.max_line_bytes} or an event over "
            f"{self.max_event_bytes} bytes."
        )
