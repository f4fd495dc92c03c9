"""Sphinx's settings."""

from __future__ import annotations

from importlib.metadata import version as installed_version

project = "Triolet"
author = "The Triolet founders"
copyright = "The Triolet founders"  # noqa: A001 - Sphinx's name for it
release = installed_version("triolet")
version = release

extensions = ["myst_parser", "sphinx_copybutton"]
html_theme = "furo"
html_title = "Triolet"
nitpicky = True
exclude_patterns = ["_build", "decisions/0000-template.md"]

# Deep enough for links to any heading that the pages link to.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# The copy button takes commands only, not their prompts and output.
copybutton_prompt_text = "$ "
