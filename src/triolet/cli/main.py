"""``triolet``: the command line. What is heavy is imported inside the command that needs it.

Exit codes: 0 a clean stop, 1 a failure while running, 2 a command line or a configuration that
cannot be meant, 3 a model that cannot be loaded or honoured.
"""

from __future__ import annotations

import os
from typing import Final

import click

from triolet import __version__
from triolet.cli.bench_options import bench
from triolet.cli.help import SettingsCommand
from triolet.config import load
from triolet.config.flags import given, parameters
from triolet.config.render import as_toml
from triolet.errors import ConfigError, StartupError

EXIT_USAGE = 2
EXIT_STARTUP = 3
#: Read once, when torch's OpenMP is loaded. Its threads wait asleep for one another, not spinning:
#: where a core is not theirs alone, spinning made steps of two threads ten times as long.
TORCH_ENVIRONMENT: Final = {"OMP_WAIT_POLICY": "passive"}


class UsageRefusal(click.ClickException):
    """What was asked for cannot be meant."""

    exit_code = EXIT_USAGE


class StartupRefusal(click.ClickException):
    """What was asked for cannot be served."""

    exit_code = EXIT_STARTUP


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="triolet")
def main() -> None:
    """Serve language models over the OpenAI API, and stop paying when the client leaves."""


def _serve(*, print_config: bool, **params: object) -> None:
    """Serve MODEL until interrupted.

    MODEL is a Hugging Face name, a local folder or a GGUF file; without one, the packaged model
    is served if it is installed.

    Each setting is taken from the command line, else its environment variable, else the --config
    file, else its default.
    """
    try:
        loaded = load(given(params), os.environ)
        for warning in loaded.warnings:
            click.echo(f"Warning: {warning}", err=True)
        if print_config:
            click.echo(as_toml(loaded), nl=False)
            return
        for name, value in TORCH_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # Trio, Hypercorn and the engine: `--help` and `--print-config` do not wait for them.
        from triolet.cli.serve import run  # noqa: PLC0415

        run(loaded.config)
    except ConfigError as error:
        raise UsageRefusal(error.message) from None
    except StartupError as error:
        raise StartupRefusal(error.message) from None


main.add_command(
    SettingsCommand(
        "serve",
        callback=_serve,
        help=_serve.__doc__,
        short_help="Serve a model.",
        params=[
            *parameters(),
            click.Option(
                ["--print-config"],
                is_flag=True,
                help="Print the effective settings as TOML, and where each came from; then exit.",
            ),
        ],
    )
)
main.add_command(bench)
