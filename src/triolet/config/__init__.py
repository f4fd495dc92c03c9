"""Everything that can be set, described once: flags, environment, file, help and docs."""

from __future__ import annotations

from triolet.config.keys import read_api_keys
from triolet.config.model import SETTINGS, Config
from triolet.config.setting import Setting
from triolet.config.sources import Loaded, load, load_config

__all__ = ["SETTINGS", "Config", "Loaded", "Setting", "load", "load_config", "read_api_keys"]
