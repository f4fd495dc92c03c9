"""The options of ``triolet bench``. Imports nothing that makes ``--help`` slow."""

from __future__ import annotations

import json
from pathlib import Path

import click

from triolet.errors import TrioletError

_POSITIVE = click.IntRange(min=1)
_COUNT = click.IntRange(min=0)
_ABOVE_ZERO = click.FloatRange(min=0, min_open=True)


def _read_object(_: click.Context, __: click.Parameter, text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise click.BadParameter("must be a JSON object.")
    return value


def _read_headers(_: click.Context, __: click.Parameter, lines: tuple[str, ...]) -> dict[str, str]:
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise click.BadParameter("must be NAME: VALUE.")
        headers[name.strip()] = value.strip()
    return headers


@click.command("bench", short_help="Measure a server.")
@click.argument("url", envvar="OPENAI_BASE_URL")
@click.option("--model", "-m", help="Default: the first that the server lists.")
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True)
@click.option(
    "--header",
    "headers",
    multiple=True,
    callback=_read_headers,
    metavar="NAME:VALUE",
    help="A header of every request; repeatable.",
)
@click.option(
    "--endpoint", type=click.Choice(["chat", "completions"]), default="chat", show_default=True
)
@click.option(
    "--num-prompts",
    "--requests",
    "-n",
    "requests",
    type=_POSITIVE,
    default=100,
    show_default=True,
    help="Requests in all.",
)
@click.option(
    "--concurrency",
    "--max-concurrency",
    "-c",
    type=_POSITIVE,
    help="Requests at once. Default: 8, or without limit with --rate.",
)
@click.option(
    "--rate",
    "--request-rate",
    "-r",
    type=_ABOVE_ZERO,
    help="Requests per second, whatever the server does: an open loop.",
)
@click.option(
    "--burstiness",
    type=_ABOVE_ZERO,
    default=1.0,
    show_default=True,
    help="With --rate: 1 is a Poisson process, less is burstier.",
)
@click.option(
    "--input-len",
    "--random-input-len",
    type=_POSITIVE,
    default=64,
    show_default=True,
    help="Tokens of each prompt.",
)
@click.option(
    "--output-len",
    "--random-output-len",
    type=_POSITIVE,
    default=128,
    show_default=True,
    help="Tokens of each answer.",
)
@click.option(
    "--shared-prefix",
    type=_COUNT,
    default=0,
    show_default=True,
    help="Of the prompt's tokens, how many all prompts share.",
)
@click.option(
    "--warmup",
    "--num-warmups",
    type=_COUNT,
    default=0,
    show_default=True,
    help="Requests before, that do not count.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of prompts and arrival times."
)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Ask for answers of full length.")
@click.option(
    "--extra-body",
    default="{}",
    callback=_read_object,
    metavar="JSON",
    help="Further fields of every request.",
)
@click.option(
    "--calibrate/--no-calibrate",
    default=True,
    show_default=True,
    help="Ask twice before, to learn how many words make --input-len tokens.",
)
@click.option(
    "--timeout",
    type=_ABOVE_ZERO,
    metavar="SECONDS",
    help="End a request after so long and count it as timeout.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write settings, figures and every request there.",
)
def bench(**given: object) -> None:
    """Send many requests to the OpenAI-compatible server at URL and print how it did.

    Without --rate, --concurrency requests are always in flight. With --rate, requests are sent
    when their time has come, and latencies count from that time. Ctrl-C prints what there is.
    """
    # Trio and httpx2: only a run needs them.
    from triolet.cli.bench import run  # noqa: PLC0415

    try:
        code = run(given)
    except TrioletError as error:
        raise click.ClickException(error.message) from None
    click.get_current_context().exit(code)
