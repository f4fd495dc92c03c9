"""Log lines for people or for programs."""

from __future__ import annotations

import logging
import sys

from pythonjsonlogger.json import JsonFormatter

#: One line for each request that ended, at INFO.
REQUEST_LOGGER = "triolet.requests"


def configure_logging(*, level: str, log_format: str, requests: bool) -> None:
    """Send this process's log to standard error.

    Args:
        level: The least severe level shown: ``debug`` to ``critical``.
        log_format: ``text``, or ``json`` for one object per line.
        requests: Whether every request's end is logged; cancelled ones count too.
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        fields = ["levelname", "name", "message"]
        handler.setFormatter(
            JsonFormatter(
                fields, timestamp=True, rename_fields={"levelname": "level", "name": "logger"}
            )
        )
    else:
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
        )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger(REQUEST_LOGGER).disabled = not requests
    # Ours says more about each request, cancelled ones included.
    logging.getLogger("hypercorn.access").disabled = True
