"""The command line of a configuration, as click parameters.

Click splits the arguments and finds near matches; it converts nothing. Values stay text, so
that one reader per setting serves every source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from triolet.config.model import SETTINGS
from triolet.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triolet.config.setting import Setting

CONFIG_VARIABLE = "TRIOLET_CONFIG"


def parameters() -> list[click.Parameter]:
    """The positional model, ``--config`` and one option for each setting."""
    return [
        click.Argument(["positional_model"], metavar="[MODEL]", required=False),
        click.Option(
            ["--config", "config"],
            metavar="FILE",
            help="TOML or YAML file with flag names as keys.",
        ),
        *(_option(setting) for setting in SETTINGS),
    ]


def _option(setting: Setting) -> click.Option:
    if setting.read.switch:
        return click.Option(
            [setting.name, f"{setting.flag}/--no-{setting.key}"], default=None, help=setting.help
        )
    return click.Option(
        [setting.name, setting.flag, *setting.aliases],
        metavar=setting.read.metavar,
        multiple=setting.repeatable,
        default=None,
        help=setting.help,
    )


def given(params: Mapping[str, object]) -> dict[str, object]:
    """The parameters that the command line set: attribute names, and ``config``, to raw values.

    Raises:
        ConfigError: The model was given twice, differently.
    """
    flags = {name: raw for name, raw in params.items() if raw is not None and raw != ()}
    positional = flags.pop("positional_model", None)
    if positional is not None and flags.setdefault("model", positional) != positional:
        raise ConfigError(
            f"The model is given twice: {positional} and --model {flags['model']}.",
            param="model",
        )
    return flags


def parse(argv: Sequence[str]) -> dict[str, object]:
    """What ``argv`` (without a program name) sets; see :func:`given`.

    Raises:
        ConfigError: An unknown flag, with the nearest known one, or a flag without its value.
    """
    command = click.Command("triolet", params=parameters(), add_help_option=False)
    try:
        return given(command.make_context("triolet", list(argv)).params)
    except click.UsageError as error:
        raise ConfigError(error.format_message()) from None
