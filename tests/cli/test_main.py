"""The command line, up to the server that it would run."""

from __future__ import annotations

import sys
import types

import pytest
from click.testing import CliRunner

from triolet.cli.main import main
from triolet.config import SETTINGS
from triolet.errors import ConfigError, ModelLoadError, UnsupportedModelError


@pytest.fixture
def served(monkeypatch):
    """What was asked to be served; stands in for the server."""
    asked = types.SimpleNamespace(config=None, outcome=0)

    def run(config):
        asked.config = config
        if isinstance(asked.outcome, Exception):
            raise asked.outcome

    module = types.ModuleType("triolet.cli.serve")
    module.run = run
    monkeypatch.setitem(sys.modules, "triolet.cli.serve", module)
    return asked


def invoke(*args, env=None):
    clean = dict.fromkeys((setting.variable for setting in SETTINGS), None)
    return CliRunner(env=clean | (env or {})).invoke(main, args)


def test_serve_serves_what_the_flags_say(served):
    result = invoke("serve", "m", "--port", "1", "--no-access-log", env={"TRIOLET_SEED": "5"})

    assert result.exit_code == 0, result.output
    assert (served.config.model, served.config.port) == ("m", 1)
    assert served.config.access_log is False
    assert served.config.seed == 5


@pytest.mark.parametrize("error", [ModelLoadError, UnsupportedModelError])
def test_a_model_that_cannot_be_served_is_one_line_and_exit_3(served, error):
    served.outcome = error("The folder holds no weights.")

    result = invoke("serve", "m")

    assert result.exit_code == 3
    assert result.stderr == "Error: The folder holds no weights.\n"


def test_a_setting_found_impossible_at_startup_is_exit_2(served):
    served.outcome = ConfigError("--ssl-keyfile k cannot be read.")

    assert invoke("serve").exit_code == 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["serve", "--prt", "1"], "Did you mean '--port'?"),
        (["serve", "--port", "x"], "--port must be a whole number from 0 to 65535, not 'x'"),
        (["serve", "--send-timeout", "nan"], "--send-timeout must be a number of seconds"),
        (["serve", "a", "b"], "unexpected extra argument"),
        (["serve", "--config", "none.toml"], "cannot be read"),
        (["srve"], "Did you mean 'serve'?"),
    ],
)
def test_what_cannot_be_meant_is_exit_2_and_a_sentence(served, args, says):
    result = invoke(*args)

    assert result.exit_code == 2
    assert says in result.stderr
    assert served.config is None


def test_an_open_server_is_warned_about(served):
    result = invoke("serve", "--host", "0.0.0.0")

    assert result.exit_code == 0
    assert "Warning: Anyone who can reach 0.0.0.0:8000" in result.stderr


def test_print_config_prints_and_serves_nothing(served):
    result = invoke("serve", "--print-config", "--api-key", "sesame")

    assert result.exit_code == 0
    assert served.config is None
    assert "port = 8000  # default" in result.stdout
    assert "sesame" not in result.output


def test_help_lists_every_setting_with_variable_and_default_in_its_group():
    text = " ".join(invoke("serve", "--help").output.split())

    for setting in SETTINGS:
        assert f" {setting.flag}" in text
        assert all(alias in text for alias in setting.aliases)
        assert f"[{setting.variable};" in text
    assert text.index("Model:") < text.index(" --dtype") < text.index("Engine:")
    assert text.index("Network:") < text.index(" --port") < text.index("Access:")


def test_version_and_help_are_there():
    assert invoke("--version").output.startswith("triolet, version ")
    assert "serve" in invoke("-h").output
