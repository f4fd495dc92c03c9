"""Help in groups, with each setting's variable and default."""

from __future__ import annotations

import click

from triolet.config import SETTINGS


class SettingsCommand(click.Command):
    """A command whose options are settings, listed under the settings' groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section for each group, then the options that are no settings."""
        described = {setting.name: setting for setting in SETTINGS}
        sections: dict[str, list[tuple[str, str]]] = {s.group: [] for s in SETTINGS}
        sections["Other"] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None or isinstance(parameter, click.Argument):
                continue
            left, text = record
            setting = described.get(parameter.name or "")
            if setting is None:
                sections["Other"].append((left, text))
                continue
            text = f"{text}  [{setting.variable}; default: {setting.default_text}]"
            sections[setting.group].append((left, text))
        for title, rows in sections.items():
            with formatter.section(title):
                # Metavars like float32|bfloat16 are long: text starts below, not far right.
                formatter.write_dl(rows, col_max=28)
