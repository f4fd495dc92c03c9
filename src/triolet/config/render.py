"""A configuration as text that is a configuration again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tomli_w

from triolet.config.model import SETTINGS

if TYPE_CHECKING:
    from triolet.config.setting import Setting
    from triolet.config.sources import Loaded


def as_toml(loaded: Loaded) -> str:
    """The effective settings, one a line, with where each value came from.

    What is not set, and every secret, stands in a comment: the text is a valid ``--config`` file
    that gives the same configuration, but for the keys.
    """
    lines = []
    group = ""
    for setting in SETTINGS:
        if setting.group != group:
            group = setting.group
            lines += ["", f"# {group}"]
        origin = loaded.origins.get(setting.name, "default")
        lines.append(f"{_assignment(setting, getattr(loaded.config, setting.name))}  # {origin}")
    return "\n".join(lines[1:]) + "\n"


def _assignment(setting: Setting, value: object) -> str:
    if setting.secret and value:
        number = len(value) if isinstance(value, tuple) else 1
        return f"# {setting.key}: {number} set, not shown"
    if value is None or value == ():
        return f"# {setting.key}: {setting.default_text}"
    if isinstance(value, tuple):
        return f"{setting.key} = [{', '.join(_literal(item) for item in value)}]"
    return f"{setting.key} = {_literal(value)}"


def _literal(value: object) -> str:
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")
