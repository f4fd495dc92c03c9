"""How a field of the configuration is described, once, for all who read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from triolet.config.values import Reader
from triolet.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

ENVIRONMENT_PREFIX = "TRIOLET_"
_METADATA_KEY = "triolet.config.Setting"


@attrs.frozen
class Setting:
    """What a user may know of one field. :class:`Config <triolet.config.Config>` has one each."""

    #: The attribute of ``Config``; the flag is the same with dashes.
    name: str
    help: str
    group: str
    read: Reader[object]
    #: What help and docs say where the user set nothing.
    default_text: str
    #: Whether the field may be None, for "not set" or "found out by itself".
    optional: bool = False
    #: Further flags with the same meaning, with their dashes: other servers' names.
    aliases: tuple[str, ...] = ()
    #: A variable of other programs that is honoured after our own.
    other_variable: str | None = None
    #: Never shown: not in errors, not in ``--print-config``, not in ``repr``.
    secret: bool = False

    @property
    def flag(self) -> str:
        """The flag on the command line."""
        return "--" + self.key

    @property
    def key(self) -> str:
        """The key in a configuration file."""
        return self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def repeatable(self) -> bool:
        """Whether the field holds any number of values."""
        return self.read.repeatable


def setting(
    default: object | Callable[[Any], object],
    read: Reader[object],
    group: str,
    *,
    help: str,  # noqa: A002 - click's and argparse's word for it
    default_text: str | None = None,
    aliases: tuple[str, ...] = (),
    other_variable: str | None = None,
    secret: bool = False,
) -> Any:  # noqa: ANN401 - attrs replaces the field by a value, as with attrs.field
    """An attrs field that carries a :class:`Setting`.

    Args:
        default: The value, or a function from the half-built ``Config`` to it.
        read: Turns what the user wrote into the value; also run on values given in code.
        group: The heading under which help and docs list it.
        help: One sentence, with the unit.
        default_text: Needed where ``default`` is None or a function.
        aliases: Further flags, with their dashes.
        other_variable: See :class:`Setting`.
        secret: See :class:`Setting`.
    """
    optional = default is None
    described: dict[str, Any] = {
        "help": help,
        "group": group,
        "read": read,
        "default_text": _as_text(default) if default_text is None else default_text,
        "optional": optional,
        "aliases": aliases,
        "other_variable": other_variable,
        "secret": secret,
    }

    def convert(raw: object, _: object, field: attrs.Attribute[Any]) -> object:
        if raw is None and optional:
            return None
        try:
            return read(raw)
        except ValueError as error:
            flag = "--" + field.name.replace("_", "-")
            sentence = str(error).partition(", not ")[0] if secret else str(error)
            raise ConfigError(f"{flag} {sentence}.", param=field.name) from None

    return attrs.field(
        default=attrs.Factory(default, takes_self=True) if callable(default) else default,
        converter=attrs.Converter(convert, takes_self=True, takes_field=True),
        metadata={_METADATA_KEY: described},
        repr=not secret,
        kw_only=True,
    )


def settings_of(cls: type[attrs.AttrsInstance]) -> tuple[Setting, ...]:
    """The settings of an attrs class whose fields were made by :func:`setting`, in order."""
    return tuple(
        Setting(name=field.name, **field.metadata[_METADATA_KEY]) for field in attrs.fields(cls)
    )


def _as_text(default: object) -> str:
    if isinstance(default, bool):
        return "true" if default else "false"
    if isinstance(default, float):
        return f"{default:g}"
    return str(default)
