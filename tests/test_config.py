"""One description of each setting; four places where its value may stand."""

from __future__ import annotations

import importlib.util
import math
import tomllib
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.config import SETTINGS, Config, load, load_config, read_api_keys
from triolet.config.engine_settings import PREFILL_TOKENS_PER_STEP
from triolet.config.render import as_toml
from triolet.errors import ConfigError

ROOT = Path(__file__).parent.parent

#: For each setting a value that is not its default, as text; None where one alone is impossible.
OTHER_VALUES = {
    "model": "some/model",
    "engine": "scripted",
    "served_model_name": "mine",
    "revision": "v1",
    "tokenizer": "some/tokenizer",
    "dtype": "bfloat16",
    "device": "cuda:1",
    "max_model_len": "2048",
    "seed": "7",
    "generation_config": "none",
    "threads": "3",
    "max_num_seqs": "5",
    "max_num_batched_tokens": "100",
    "quantization": "int8",
    "block_size": "32",
    "kv_cache_memory": "1048576",
    "enable_prefix_caching": "false",
    "prefix_cache_scope": "server",
    "gpu_memory_utilization": "0.5",
    "enforce_eager": "true",
    "max_num_queued_reqs": "9",
    "max_num_queued_tokens": "4096",
    "scheduling_policy": "priority",
    "engine_stall_timeout": "8.5",
    "max_n": "3",
    "max_logprobs": "0",
    "host": "::1",
    "port": "8001",
    "uds": "run/triolet.sock",
    "root_path": "/llm",
    "ssl_keyfile": None,
    "ssl_certfile": None,
    "max_connections": "10",
    "max_body_size": "1000",
    "socket_send_buffer": "4096",
    "keep_alive_timeout": "5.5",
    "api_key": "sesame",
    "api_key_file": "keys.txt",
    "max_stream_buffer": "1024",
    "max_stream_tokens": "128",
    "commit_after": "1.5",
    "keepalive": "2.5",
    "send_timeout": "3.5",
    "queue_timeout": "7.5",
    "request_timeout": "4.5",
    "drain_timeout": "6.5",
    "log_level": "debug",
    "log_format": "json",
    "access_log": "false",
    "scripted_text": "Hello there",
    "scripted_step_ms": "1.5",
}
SINGLE = [s for s in SETTINGS if OTHER_VALUES[s.name] is not None]


def refusal(argv=(), environ=None):
    with pytest.raises(ConfigError) as caught:
        load_config(argv, environ or {})
    return caught.value


def flags_for(setting):
    if setting.read.switch:
        return [setting.flag if OTHER_VALUES[setting.name] == "true" else f"--no-{setting.key}"]
    return [setting.flag, OTHER_VALUES[setting.name]]


def test_defaults_need_nothing():
    config = load_config((), {})

    assert config.model is None
    assert config.engine == "torch"
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    assert config.max_body_size == 4 * 1024**2
    assert config == Config()


def test_every_setting_has_a_test_value():
    assert set(OTHER_VALUES) == {setting.name for setting in SETTINGS}


@pytest.mark.parametrize("setting", SINGLE, ids=lambda s: s.name)
def test_each_setting_is_the_same_from_every_source(setting, tmp_path):
    text = OTHER_VALUES[setting.name]
    file = tmp_path / "triolet.yaml"
    file.write_text(f"{setting.key}: {text!r}\n")

    from_flag = load_config(flags_for(setting), {})
    from_variable = load_config((), {setting.variable: text})
    from_file = load_config(["--config", str(file)], {})

    assert from_flag == from_variable == from_file
    assert getattr(from_flag, setting.name) != getattr(Config(), setting.name)


@pytest.mark.parametrize("setting", SINGLE, ids=lambda s: s.name)
def test_dashes_and_underscores_are_the_same_in_a_file(setting, tmp_path):
    file = tmp_path / "triolet.toml"
    file.write_text(f'{setting.name} = "{OTHER_VALUES[setting.name]}"\n')

    assert load_config(["--config", str(file)], {}) == load_config(flags_for(setting), {})


def test_the_command_line_wins_over_the_environment_over_the_file_over_the_default(tmp_path):
    file = tmp_path / "triolet.toml"
    file.write_text("port = 1\nmax-num-seqs = 1\nblock-size = 1\n")
    environ = {"TRIOLET_CONFIG": str(file), "TRIOLET_PORT": "2", "TRIOLET_MAX_NUM_SEQS": "2"}

    config = load_config(["--port", "3"], environ)

    assert (config.port, config.max_num_seqs, config.block_size) == (3, 2, 1)
    assert config.keepalive == 15


def test_aliases_are_other_servers_names(tmp_path):
    file = tmp_path / "triolet.toml"
    file.write_text("shutdown-timeout = 3\n")

    config = load_config(["--alias", "a", "--served-model-name", "b", "--config", str(file)], {})

    assert config.served_model_name == ("a", "b")
    assert config.drain_timeout == 3


def test_a_flag_of_one_letter_is_for_the_command_line_alone(tmp_path):
    assert load_config(["-q", "int8"], {}).quantization == "int8"
    for key in ("q", "-q"):
        file = tmp_path / "triolet.yaml"
        file.write_text(f"{key}: int8\n")
        assert "no such setting" in refusal(["--config", str(file)]).message


def test_the_model_may_stand_alone_or_behind_its_flag_but_not_be_two():
    assert load_config(["m"], {}).model == load_config(["--model", "m"], {}).model == "m"
    assert load_config(["m", "--model", "m"], {}).model == "m"
    assert "given twice" in refusal(["m", "--model", "n"]).message


def test_an_empty_variable_is_not_set():
    assert load_config((), {"TRIOLET_PORT": "", "TRIOLET_API_KEY": "", "TRIOLET_CONFIG": ""}) == (
        Config()
    )


def test_a_variable_holds_several_values_with_commas():
    assert load_config((), {"TRIOLET_API_KEY": "one, two,"}).api_key == ("one", "two")


def test_omp_num_threads_is_honoured_after_our_own_variable():
    assert load_config((), {"OMP_NUM_THREADS": "4,2"}).threads == 4
    assert load_config((), {"OMP_NUM_THREADS": "4", "TRIOLET_THREADS": "3"}).threads == 3


def test_a_step_has_room_for_every_sequence_and_a_prefill_chunk():
    assert Config(max_num_seqs=8).max_num_batched_tokens == 8 + PREFILL_TOKENS_PER_STEP
    with pytest.raises(ConfigError, match="at least --max-num-seqs"):
        Config(max_num_seqs=8, max_num_batched_tokens=7)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_model_len", "8k", 8000),
        ("max_model_len", "8K", 8192),
        ("max_model_len", "1.5k", 1500),
        ("kv_cache_memory", "2GiB", 2 * 1024**3),
        ("kv_cache_memory", "1.5 gib", 1536 * 1024**2),
        ("max_body_size", "10MB", 10_000_000),
        ("max_body_size", "7", 7),
        ("log_level", "WARN", "warning"),
        ("dtype", "half", "float16"),
        ("access_log", "off", False),
        ("keepalive", "0", 0),
    ],
)
def test_values_may_be_written_as_people_write_them(name, text, value):
    assert getattr(load_config((), {f"TRIOLET_{name.upper()}": text}), name) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("port", "65536"),
        ("port", "-1"),
        ("port", "8e3"),
        ("port", "٣"),
        ("port", "9" * 5000),
        ("max_num_seqs", "0"),
        ("max_model_len", "0"),
        ("max_model_len", "8g"),
        ("max_model_len", "1.0001k"),
        ("kv_cache_memory", "2G"),
        ("kv_cache_memory", "0"),
        ("socket_send_buffer", "3GiB"),
        ("keepalive", "nan"),
        ("keepalive", "inf"),
        ("keepalive", "-1"),
        ("keepalive", "1e9"),
        ("send_timeout", "0"),
        ("send_timeout", "soon"),
        ("scripted_step_ms", "nan"),
        ("access_log", "maybe"),
        ("engine", "vllm"),
        ("device", "gpu"),
        ("dtype", "int8"),
        ("host", "a b"),
        ("uds", "x" * 108),
        ("root_path", "llm"),
        ("root_path", "/llm/"),
        ("served_model_name", "two words"),
        ("model", "a\nb"),
    ],
)
def test_an_impossible_value_is_refused_with_a_sentence_that_says_where_it_stood(name, text):
    error = refusal((), {f"TRIOLET_{name.upper()}": text})

    assert error.param == name
    assert error.message.startswith(f"--{name.replace('_', '-')} must be ")
    assert error.message.endswith(f"(environment TRIOLET_{name.upper()}).")
    assert len(error.message) < 300


@pytest.mark.parametrize("value", [True, None, [], {}, b"8", math.nan, -math.inf, 1.5])
def test_a_number_given_in_code_or_a_file_must_be_one(value):
    with pytest.raises(ConfigError, match="--port must be a whole number"):
        Config(port=value)


@given(st.sampled_from(SETTINGS), st.none() | st.booleans() | st.floats() | st.text() | st.binary())
def test_any_value_is_read_or_refused_and_reads_again_as_itself(setting, raw):
    try:
        config = Config(**{setting.name: raw})
    except ConfigError as error:
        named = error.param
    else:
        named = setting.name
        assert attrs.evolve(config) == config

    # The partner of a TLS file and the sequences of a step are named for their setting too.
    assert named in OTHER_VALUES


def test_an_unknown_flag_is_refused_with_the_nearest_known_one():
    assert "--max-num-seqs" in refusal(["--max-num-seq", "1"]).message


def test_a_flag_without_its_value_is_refused():
    assert "--port" in refusal(["--port"]).message


@pytest.mark.parametrize(
    ("suffix", "content", "says"),
    [
        (".toml", "prot = 1", "no such setting. Did you mean port?"),
        (".toml", "[server]\nport = 1", "no such setting"),
        (".toml", "config = 'x'", "no such setting"),
        (".toml", "port = ", "is broken"),
        (".yaml", "a: [", "is broken"),
        (".yaml", "seed: 2024-13-45", "is broken"),
        (".yaml", "[" * 1100, "is broken"),
        (".toml", "seed = " + "9" * 5000, "is broken"),
        (".yaml", "- port", "must map"),
        (".yaml", "drain-timeout: 1\nshutdown_timeout: 2", "more than once"),
        (".yaml", "port: [1]", "must be a whole number"),
        (".yaml", "api-key: {a: b}", "must be a list"),
        (".ini", "", "must be a .toml"),
    ],
)
def test_a_bad_file_is_refused_with_a_sentence(suffix, content, says, tmp_path):
    file = tmp_path / f"triolet{suffix}"
    file.write_text(content)

    message = refusal(["--config", str(file)]).message

    assert says in message
    assert "\n" not in message


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")

    assert "cannot be read" in refusal(["--config", str(tmp_path / "none.toml")]).message
    assert "is broken" in refusal(["--config", str(tmp_path / "binary.toml")]).message


def test_an_empty_file_and_null_values_set_nothing(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "null.yaml").write_text("port: null\n")

    assert load_config(["--config", str(tmp_path / "empty.yaml")], {}) == Config()
    assert load_config(["--config", str(tmp_path / "null.yaml")], {}) == Config()


def test_tls_needs_both_files():
    assert Config(ssl_keyfile="k", ssl_certfile="c").ssl_keyfile == "k"
    with pytest.raises(ConfigError, match="--ssl-certfile is missing"):
        Config(ssl_keyfile="k")
    with pytest.raises(ConfigError, match="--ssl-keyfile is missing"):
        Config(ssl_certfile="c")


def test_a_service_link_of_kubernetes_is_told_apart_from_a_port():
    assert "Kubernetes" in refusal((), {"TRIOLET_PORT": "tcp://10.0.0.1:80"}).message


def test_a_variable_that_is_nearly_a_setting_is_warned_about():
    environ = {"TRIOLET_PROT": "1", "TRIOLET_SERVICE_HOST": "10.0.0.1"}

    assert load({}, environ).warnings == (
        "TRIOLET_PROT is set, but no setting has that name; did you mean TRIOLET_PORT?",
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_an_open_server_is_warned_about(host):
    (warning,) = load({"host": host}, {}).warnings

    assert host in warning
    assert not load({"host": host, "api_key": ("k",)}, {}).warnings
    assert not load({"host": host, "uds": "x.sock"}, {}).warnings


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_loopback_server_is_not_warned_about(host):
    assert not load({"host": host}, {}).warnings


def test_printed_settings_are_a_file_that_gives_the_same_settings(tmp_path):
    argv = [arg for setting in SINGLE if not setting.secret for arg in flags_for(setting)]
    file = tmp_path / "printed.toml"
    from triolet.config.flags import parse  # noqa: PLC0415 - the CLI's half of load_config

    for flags in (parse(argv), {}):
        loaded = load(flags, {})
        file.write_text(as_toml(loaded))

        assert load_config(["--config", str(file)], {}) == loaded.config


def test_printed_settings_say_where_they_came_from(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text("port = 1\n")

    text = as_toml(load({"config": str(file), "host": "::1"}, {"TRIOLET_KEEPALIVE": "3"}))

    assert f"\nport = 1  # file {file}\n" in text
    assert '\nhost = "::1"  # command line --host\n' in text
    assert "\nkeepalive = 3.0  # environment TRIOLET_KEEPALIVE\n" in text
    assert "\nmax-num-seqs = 32  # default\n" in text
    assert tomllib.loads(text)["port"] == 1


def test_keys_are_never_shown():
    loaded = load({}, {"TRIOLET_API_KEY": "sesame,open"})

    assert loaded.config.api_key == ("sesame", "open")
    assert "sesame" not in as_toml(loaded)
    assert "2 set, not shown" in as_toml(loaded)
    assert "sesame" not in repr(loaded)
    assert "ses ame" not in refusal((), {"TRIOLET_API_KEY": "ses ame"}).message
    assert "ses ame" not in refusal(["--api-key", "ses ame"]).message


def test_a_key_file_adds_its_lines(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# mine\none\n\n  two  \n")

    assert read_api_keys(Config(api_key=("zero",), api_key_file=str(file))) == (
        "zero",
        "one",
        "two",
    )
    assert read_api_keys(Config(api_key=("zero",))) == ("zero",)
    assert read_api_keys(Config()) == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no key"),
        (b"# all\n", "holds no key"),
        (b"\xff", "not ASCII"),
        (b"a b", "spaces"),
    ],
)
def test_a_useless_key_file_never_opens_the_server(content, says, tmp_path):
    file = tmp_path / "keys"
    file.write_bytes(content)

    with pytest.raises(ConfigError, match=says):
        read_api_keys(Config(api_key_file=str(file)))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_api_keys(Config(api_key_file=str(tmp_path / "none")))


def test_the_reference_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("page", ROOT / "docs" / "configuration_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert page == module.page(), "run: python docs/configuration_page.py"


def test_a_broken_file_does_not_repeat_the_keys_in_it(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("api-key: [sk-topsecret\nport: 8000\n")
    message = refusal(["--config", str(path)]).message
    assert "sk-topsecret" not in message
    assert "line 2" in message


def test_a_variable_of_nothing_but_commas_does_not_mean_no_key():
    with pytest.raises(ConfigError, match="TRIOLET_API_KEY is set and names nothing"):
        load_config(environ={"TRIOLET_API_KEY": " , "})
