"""Where a configuration comes from: command line > environment > file > default."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import yaml

from triolet.config.flags import CONFIG_VARIABLE, parse
from triolet.config.model import SETTINGS, Config
from triolet.config.setting import ENVIRONMENT_PREFIX
from triolet.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from triolet.config.setting import Setting


@attrs.frozen
class Given:
    """A raw value and where it stood, for errors and ``--print-config``."""

    raw: Any
    origin: str


@attrs.frozen
class Loaded:
    """A configuration and how it came about."""

    config: Config
    #: For each attribute that is not at its default: where its value stood.
    origins: Mapping[str, str]
    #: Sentences on what is probably not meant.
    warnings: tuple[str, ...] = ()


def load_config(argv: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Config:
    """The configuration that a command line and an environment ask for.

    Raises:
        ConfigError: Something in it is unknown or impossible; the message says what and where.
    """
    return load(parse(argv) if argv else {}, environ).config


def load(flags: Mapping[str, object], environ: Mapping[str, str]) -> Loaded:
    """As :func:`load_config`, from flags already parsed (attribute names and ``config``).

    Raises:
        ConfigError: As :func:`load_config`.
    """
    flags = dict(flags)
    path = flags.pop("config", None) or environ.get(CONFIG_VARIABLE)
    settings = {setting.name: setting for setting in SETTINGS}
    values: dict[str, Given] = {}
    if path:
        values.update(_from_file(str(path)))
    values.update(_from_environment(environ))
    values.update(
        (name, Given(raw, f"command line {settings[name].flag}")) for name, raw in flags.items()
    )
    try:
        config = Config(**{name: given.raw for name, given in values.items()})
    except ConfigError as error:
        given_here = values.get(error.param or "")
        if given_here is None:
            raise
        message = f"{error.message.removesuffix('.')} ({given_here.origin})."
        raise ConfigError(message, param=error.param) from None
    origins = {name: given.origin for name, given in values.items()}
    warnings = [*_misspelt(environ), *([config.open_to_all] if config.open_to_all else [])]
    return Loaded(config, origins, tuple(warnings))


def _from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """What the environment sets. An empty variable is an unset one, as compose files write it."""
    values = {}
    for setting in SETTINGS:
        name = setting.variable
        if not environ.get(name) and setting.other_variable is not None:
            name = setting.other_variable
        text = environ.get(name, "")
        if not text:
            continue
        if name == "TRIOLET_PORT" and text.startswith("tcp://"):
            raise ConfigError(
                "TRIOLET_PORT is an address, which Kubernetes sets for a service named "
                "triolet: name the service otherwise, or set enableServiceLinks: false.",
                param="port",
            )
        values[setting.name] = Given(_split(setting, name, text), f"environment {name}")
    return values


def _split(setting: Setting, variable: str, text: str) -> object:
    if setting.repeatable:
        items = tuple(item.strip() for item in text.split(",") if item.strip())
        if not items:
            # Two unset variables joined by a comma must not mean "no key needed".
            raise ConfigError(f"{variable} is set and names nothing.", param=setting.name)
        return items
    if variable == "OMP_NUM_THREADS":
        # OpenMP allows a list, one number for each level of nesting; the first is ours.
        return text.partition(",")[0]
    return text


def _misspelt(environ: Mapping[str, str]) -> Iterable[str]:
    """Warnings, not errors: a name with our prefix may be another program's."""
    known = [setting.variable for setting in SETTINGS] + [CONFIG_VARIABLE]
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            if near:
                yield f"{name} is set, but no setting has that name; did you mean {near[0]}?"


def _from_file(path: str) -> dict[str, Given]:
    """What a TOML or YAML file sets. Keys are flag names, with dashes or underscores."""
    names = {setting.key: setting.name for setting in SETTINGS}
    for setting in SETTINGS:
        # A flag of one letter is for a command line.
        words = (alias for alias in setting.aliases if alias.startswith("--"))
        names.update((word.removeprefix("--"), setting.name) for word in words)
    values: dict[str, Given] = {}
    for key, raw in _read_file(path).items():
        name = names.get(str(key).replace("_", "-"))
        if name is None:
            near = difflib.get_close_matches(str(key).replace("_", "-"), names, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{path} sets {key}, and there is no such setting.{hint}")
        if name in values:
            raise ConfigError(f"{path} sets {key} more than once.", param=name)
        values[name] = Given(raw, f"file {path}")
    return {name: given for name, given in values.items() if given.raw is not None}


def _read_file(path: str) -> Mapping[object, object]:
    suffix = Path(path).suffix.lower()
    if suffix not in {".toml", ".yaml", ".yml"}:
        raise ConfigError(f"--config {path} must be a .toml, .yaml or .yml file.", param="config")
    try:
        text = Path(path).read_text(encoding="utf-8")
        content: object = tomllib.loads(text) if suffix == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(
            f"--config {path} cannot be read: {error.strerror}.", param="config"
        ) from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        # YAML's own text quotes the line, and a key may stand in it.
        mark = getattr(error, "problem_mark", None)
        reason = (
            f"line {mark.line + 1}: {getattr(error, 'problem', None) or 'not YAML'}"
            if mark
            else " ".join(str(error).split())
        )
        raise ConfigError(f"--config {path} is broken: {reason}.", param="config") from None
    if content is None:  # an empty YAML file
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must map setting names to values.", param="config")
    return content
