"""JSON in and out: bytes to attrs types and back, strictly.

One cattrs converter serves all request types. It is built so that every error knows its place:

- Primitives are strict. ``"false"`` is no boolean, ``true`` is no integer, ``1.0`` is no
  integer; an integer is a number. Nothing is coerced.
- ``null`` means that the field was left out, also for fields whose default is not ``None``.
- Fields are read in the order in which the class declares them, and the first error wins, so
  one body always gets one answer, and a body full of errors costs no more than one.
- Fields that the class does not know are ignored, unless its ``refuses`` table names them: those
  are refused unless they have a value that changes nothing.

Limits are part of a field's type, as in ``Annotated[float, Within(0, 2)]``, and are checked
before anything is built from the value. A hook that finds an error raises :class:`FieldError`;
every level that it passes adds its name or index, and :func:`decode_request` turns the result
into the one error that a client sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args, get_origin

import attrs
import orjson
from cattrs import Converter

from triolet.errors import InvalidRequestError

T = TypeVar("T")
#: What cattrs calls with a JSON value and the type that it should become.
Hook = Callable[[Any, Any], Any]

#: Characters of a client's value that an error message repeats: enough to recognise it, too few
#: to flood a log or to hand somebody's prompt around.
SHOWN_CHARACTERS = 60

# orjson leaves these characters as they are; clients that split lines as Python's
# ``str.splitlines`` does would cut an event there. In UTF-8 no other character contains these
# byte sequences, and in JSON a non-ASCII character only occurs inside a string.
_LINE_ENDS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)


class FieldError(Exception):
    """A value is wrong; ``path`` leads to it and ``sentence`` goes on after its name."""

    def __init__(self, sentence: str, *path: str | int) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.path = path

    def under(self, place: str | int) -> FieldError:
        """Return the same error, seen from one level further out."""
        return FieldError(self.sentence, place, *self.path)


@attrs.frozen
class Within:
    """Bounds of a number, both inclusive unless ``low_open``; ``None`` is no bound."""

    low: float
    high: float | None = None
    low_open: bool = False

    def check(self, value: object) -> None:
        """Raise FieldError for a number out of bounds."""
        if type(value) is not int and type(value) is not float:
            return
        below = value <= self.low if self.low_open else value < self.low
        if below or (self.high is not None and value > self.high):
            bounds = f"{'greater than' if self.low_open else 'at least'} {self.low}"
            if self.high is not None:
                bounds += f" and at most {self.high}"
            raise FieldError(f"must be {bounds}, not {value}.")


@attrs.frozen
class Length:
    """Bounds of the characters of a string or the items of an array, both inclusive."""

    low: int
    high: int

    def check(self, value: object) -> None:
        """Raise FieldError for a string or array that is too short or too long."""
        if type(value) is str:
            unit = "characters"
        elif type(value) is list:
            unit = "items"
        else:
            return
        size = len(value)
        if size < self.low == 1:
            raise FieldError("must not be empty.")
        if not self.low <= size <= self.high:
            bounds = f"{self.low} to {self.high}" if self.low else f"at most {self.high}"
            raise FieldError(f"must have {bounds} {unit}, not {size}.")


@attrs.frozen
class ReadBy:
    """Part of the type of a field with several forms: the function that reads them all.

    It takes any JSON value but ``null`` and raises FieldError for those that it does not take.
    """

    read: Callable[[Any], object]


def decode_request(body: bytes, cls: type[T]) -> T:
    """Read a request body.

    Args:
        body: UTF-8 JSON; the caller has bounded its length.
        cls: The attrs type of the request.

    Raises:
        InvalidRequestError: The body is not JSON, or a field is missing, malformed, out of
            range, or not supported; ``param`` names the field as OpenAI does, as in
            ``messages[1].role``, and is ``None`` where the body as a whole is at fault.
    """
    value = parse(body)
    if type(value) is not dict:
        raise InvalidRequestError(f"The body must be a JSON object, not {described(value)}.")
    try:
        return converter.structure(value, cls)
    except FieldError as error:
        param = _param(error.path)
        raise InvalidRequestError(f"`{param}` {error.sentence}", param=param) from None


def parse(body: bytes) -> object:
    """Parse JSON; NaN, Infinity, lone surrogates and more than 1024 levels are not JSON here.

    Raises:
        InvalidRequestError: The body is not JSON, or not UTF-8.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        reason = str(error)
    # Outside of the handler: the parser's error holds the whole body, and a logged chain of
    # exceptions would keep it alive.
    try:
        body.decode()
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not valid UTF-8"
    raise InvalidRequestError(f"The body is not valid JSON: {reason}.")


def encode(value: object) -> bytes:
    """Write a response as one line of JSON that no client can take for two.

    U+2028, U+2029 and U+0085 are escaped. Object keys must be strings.

    Raises:
        ValueError: A number is NaN or infinite: JSON has no such number, and the ``null`` that
            the writer would put in its place would hide a mistake of ours.
        TypeError: A value that JSON does not know, an integer beyond 64 bits, or a string with
            a lone surrogate.
    """
    _refuse_nonfinite(value)
    data = orjson.dumps(value)
    if not data.isascii():
        for raw, escaped in _LINE_ENDS:
            data = data.replace(raw, escaped)
    return data


def described(value: object) -> str:
    """Say what a JSON value is, in at most a hundred characters, for an error message."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            # repr escapes what cannot be printed, so that a message stays one line of text.
            shown = repr(value[:SHOWN_CHARACTERS])
            if len(value) > SHOWN_CHARACTERS or len(shown) > SHOWN_CHARACTERS + 2:
                shown = shown[: SHOWN_CHARACTERS + 1] + "…" + shown[0]
            return f"the string {shown}"
        case int() | float():
            return f"the number {value}"
        case list():
            return "an array"
        case _:
            return "an object"


def mismatch(expected: str, value: object) -> FieldError:
    """Make the error for a value of the wrong type."""
    return FieldError(f"must be {expected}, not {described(value)}.")


def read_object(value: object) -> dict[str, object]:
    """Return the value if it is a JSON object.

    Raises:
        FieldError: It is something else.
    """
    if type(value) is not dict:
        raise mismatch("an object", value)
    return value


def _param(path: tuple[str | int, ...]) -> str:
    """Write a path as OpenAI does: ``messages[1].role``."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")


def _refuse_nonfinite(value: object) -> None:
    kind = type(value)
    if kind is dict:
        for item in value.values():  # type: ignore[attr-defined]  # mypy does not narrow by kind
            if type(item) in _MAY_HOLD_FLOATS:
                _refuse_nonfinite(item)
    elif kind is list or kind is tuple:
        for item in value:  # type: ignore[attr-defined]  # mypy does not narrow by kind
            if type(item) in _MAY_HOLD_FLOATS:
                _refuse_nonfinite(item)
    elif kind is float and not math.isfinite(value):  # type: ignore[arg-type]  # as above
        raise ValueError(f"{value} is not a JSON number")


_MAY_HOLD_FLOATS = frozenset({dict, list, tuple, float})


def _neutral(value: object, neutrals: tuple[object, ...]) -> bool:
    """Whether the value is one of the neutral ones; ``1`` is ``1.0``, but neither is ``true``."""
    return any(
        value == neutral and isinstance(value, bool) is isinstance(neutral, bool)
        for neutral in neutrals
    )


def _refuse_unsupported(
    value: Mapping[str, object], refuses: Mapping[str, tuple[object, ...]]
) -> None:
    for name, neutrals in refuses.items():
        item = value.get(name)
        if item is not None and not _neutral(item, neutrals):
            allowed = " or ".join(orjson.dumps(neutral).decode() for neutral in (*neutrals, None))
            raise FieldError(
                f"with this value is not supported yet: leave it out, or send {allowed}.", name
            )


def _read_str(value: object, _: object) -> str:
    if type(value) is not str:
        raise mismatch("a string", value)
    return value


def _read_bool(value: object, _: object) -> bool:
    if type(value) is not bool:
        raise mismatch("true or false", value)
    return value


def _read_int(value: object, _: object) -> int:
    if type(value) is not int:
        raise mismatch("an integer", value)
    return value


def _read_float(value: object, _: object) -> float:
    if type(value) is not float and type(value) is not int:
        raise mismatch("a number", value)
    return float(value)


def _is_array(kind: object) -> bool:
    return get_origin(kind) is tuple


def _is_annotated(kind: object) -> bool:
    return get_origin(kind) is Annotated


def _annotated_hook(annotated: object, converter: Converter) -> Hook:
    inner, *marks = get_args(annotated)
    readers = [mark.read for mark in marks if isinstance(mark, ReadBy)]
    limits = [mark for mark in marks if isinstance(mark, (Within, Length))]
    if readers:
        (read,) = readers
    else:
        hook = converter.get_structure_hook(inner)

        def read(value: object) -> object:
            return hook(value, inner)

    def structure(value: object, _: object) -> object:
        for limit in limits:
            limit.check(value)
        return read(value)

    return structure


def _array_hook(array: object, converter: Converter) -> Hook:
    item_type = get_args(array)[0]
    hook = converter.get_structure_hook(item_type)

    def structure(value: object, _: object) -> tuple[object, ...]:
        if type(value) is not list:
            raise mismatch("an array", value)
        items: list[object] = []
        for index, item in enumerate(value):
            try:
                items.append(hook(item, item_type))
            except FieldError as error:
                raise error.under(index) from None
        return tuple(items)

    return structure


def _object_hook(cls: type[attrs.AttrsInstance], converter: Converter) -> Hook:
    attrs.resolve_types(cls)
    fields = [
        (field.name, field.type, converter.get_structure_hook(field.type))
        for field in attrs.fields(cls)
    ]
    required = {field.name for field in attrs.fields(cls) if field.default is attrs.NOTHING}
    refuses: Mapping[str, tuple[object, ...]] = getattr(cls, "refuses", {})

    def structure(value: object, _: object) -> object:
        given = read_object(value)
        arguments: dict[str, object] = {}
        for name, field_type, hook in fields:
            item = given.get(name)
            if item is None:
                if name in required:
                    # A refused field may stand in its place, as tool calls do for content.
                    _refuse_unsupported(given, refuses)
                    raise FieldError("is required.", name)
                continue
            try:
                arguments[name] = hook(item, field_type)
            except FieldError as error:
                raise error.under(name) from None
        _refuse_unsupported(given, refuses)
        return cls(**arguments)

    return structure


def _make_converter() -> Converter:
    made = Converter(detailed_validation=False)
    made.register_structure_hook(str, _read_str)
    made.register_structure_hook(bool, _read_bool)
    made.register_structure_hook(int, _read_int)
    made.register_structure_hook(float, _read_float)
    made.register_structure_hook_factory(attrs.has, lambda cls: _object_hook(cls, made))
    made.register_structure_hook_factory(_is_array, lambda array: _array_hook(array, made))
    made.register_structure_hook_factory(
        _is_annotated, lambda annotated: _annotated_hook(annotated, made)
    )
    return made


#: Structures JSON values into the attrs types of :mod:`triolet.wire`.
converter = _make_converter()
