"""Writes reference/configuration.md from the settings themselves.

Run it after a change of a setting; a test compares the page with what this prints.
"""

from __future__ import annotations

from pathlib import Path

from triolet.config import SETTINGS, Setting

PAGE = Path(__file__).parent / "reference" / "configuration.md"
INTRODUCTION = """\
<!-- Written by docs/configuration_page.py; do not edit. -->

# Configuration

Every setting can stand in four places. The first that has it wins:

1. the command line: `triolet serve --port 8001`
2. the environment: `TRIOLET_PORT=8001`. An empty variable counts as not set; where a setting holds
   several values, commas stand between them.
3. a TOML or YAML file, named by `--config` or `TRIOLET_CONFIG`, with flag names as keys:
   `port = 8001`
4. the default.

`triolet serve --print-config` prints the settings in effect and where each came from; what it
prints is a configuration file. API keys are never printed. A server that starts in another way,
such as `hypercorn -k trio triolet.asgi:app`, reads the environment and the file.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for group in dict.fromkeys(setting.group for setting in SETTINGS):
        parts += [
            f"## {group}",
            "",
            "| Flag | Value | Default | Meaning |",
            "| --- | --- | --- | --- |",
            *(_row(setting) for setting in SETTINGS if setting.group == group),
            "",
        ]
    return "\n".join(parts)


def _row(setting: Setting) -> str:
    flags = [setting.flag, *setting.aliases]
    if setting.read.switch:
        flags.append(f"--no-{setting.key}")
    variables = [setting.variable, *filter(None, [setting.other_variable])]
    names = ", ".join(f"`{name}`" for name in (*flags, *variables))
    value = setting.read.metavar.replace("|", "`, `")
    default = setting.default_text or "empty"
    return f"| {names} | `{value}` | {default} | {setting.help} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
