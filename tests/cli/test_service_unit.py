"""The systemd unit that we hand out fits the server that we have."""

from __future__ import annotations

import shlex
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from triolet.cli.main import main
from triolet.config import SETTINGS

UNIT = Path(__file__).parents[2] / "examples" / "triolet.service"
#: The contract's bound on an exit after the drain timeout (§10).
EXIT_S = 2


@pytest.fixture
def unit():
    """All values of each option, whatever its section."""
    options = defaultdict(list)
    for line in UNIT.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            options[name].append(value)
    return options


@pytest.fixture
def config(unit):
    """What the unit's command line means."""
    (command,) = unit["ExecStart"]
    program, verb, *flags = shlex.split(command)
    assert (Path(program).name, verb) == ("triolet", "serve")
    clean = dict.fromkeys((setting.variable for setting in SETTINGS), None)
    result = CliRunner(env=clean).invoke(main, [verb, *flags, "--print-config"])
    assert result.exit_code == 0, result.output
    return tomllib.loads(result.stdout)


def test_its_command_line_can_be_meant(config):
    assert config["log-format"] == "json"
    assert config["engine-stall-timeout"] == 60


def test_it_waits_for_the_drain_and_the_exit(unit, config):
    (stop,) = unit["TimeoutStopSec"]
    assert float(stop) > config["drain-timeout"] + EXIT_S


def test_it_hears_what_we_say_and_heeds_our_exit_codes(unit):
    assert unit["Type"] == ["notify"]
    assert unit["NotifyAccess"] == ["main"]
    assert unit["KillMode"] == ["mixed"]
    assert unit["Restart"] == ["on-failure"]
    assert unit["RestartPreventExitStatus"] == ["2"]
    assert len(unit["WatchdogSec"]) == 1


def test_a_model_can_be_downloaded_although_the_system_is_read_only(unit):
    assert unit["ProtectSystem"] == ["strict"]
    (folder,) = unit["CacheDirectory"]
    assert f"HF_HOME=%C/{folder}" in unit["Environment"]
