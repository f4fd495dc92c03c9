"""The API keys that a configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from triolet.errors import ConfigError

if TYPE_CHECKING:
    from triolet.config.model import Config


def read_api_keys(config: Config) -> tuple[str, ...]:
    """All keys that clients may send, those of the key file included; empty where none is asked.

    Raises:
        ConfigError: The key file cannot be read, holds no key, or holds an impossible one. An
            empty file never means "no key needed".
    """
    if config.api_key_file is None:
        return config.api_key
    try:
        text = Path(config.api_key_file).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise ConfigError(
            f"--api-key-file {config.api_key_file} cannot be read: {reason}.",
            param="api_key_file",
        ) from None
    lines = [line.strip() for line in text.splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(
            f"--api-key-file {config.api_key_file} holds no key.", param="api_key_file"
        )
    # The same characters are allowed wherever a key comes from.
    return type(config)(api_key=(*config.api_key, *keys)).api_key
