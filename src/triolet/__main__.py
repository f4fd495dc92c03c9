"""``python -m triolet`` is the ``triolet`` command."""

from __future__ import annotations

from triolet.cli.main import main

main(prog_name="triolet")
