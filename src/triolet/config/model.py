"""The one description of everything that can be set.

Flags, environment variables, keys of the configuration file, help, ``--print-config`` and the
reference page are all made from the fields of :class:`Config`. To add a setting, add a field.
Names follow vLLM's where it has the thing, since scripts and charts use them.
"""

from __future__ import annotations

import ipaddress

import attrs

from triolet.config.engine_settings import ENGINE, EngineSettings
from triolet.config.setting import Setting, setting, settings_of
from triolet.config.values import (
    MAX_INT,
    byte_count,
    choice,
    milliseconds,
    seconds,
    several,
    switch,
    text,
    token_count,
    whole,
)
from triolet.errors import ConfigError

MODEL = "Model"
NETWORK = "Network"
ACCESS = "Access"
STREAMS = "Streams"
TIME = "Time"
LOGS = "Logs"
SCRIPT = "Scripted engine"
GROUPS = (MODEL, ENGINE, NETWORK, ACCESS, STREAMS, TIME, LOGS, SCRIPT)

_PATH = text("PATH", "a path, not empty")
_KEY = text(
    metavar="KEY",
    pattern=r"[!-+\--~]+",
    what="printable ASCII characters without spaces or commas, not empty",
)
_NAME = text(
    metavar="NAME",
    pattern=r"[^\s,\x00-\x1f\x7f]+",
    what="a name without spaces or commas",
    most=256,
)


@attrs.frozen(kw_only=True)
class Config(EngineSettings):
    """Everything that can be set, checked. Sizes are bytes and times seconds where not named.

    Raises:
        ConfigError: A value is impossible, alone or together with another; ``param`` names it.
    """

    model: str | None = setting(
        None,
        text("MODEL", "a model's name or folder, not empty"),
        MODEL,
        help="Hugging Face name, local folder, or GGUF file of the model.",
        default_text="the packaged model, if installed",
    )
    engine: str = setting(
        "torch",
        choice("torch", "scripted"),
        MODEL,
        help="What computes tokens: the local engine on torch, or a script that needs no model.",
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        several(_NAME),
        MODEL,
        help="Name of the model in the API; repeat for more. Responses report the first.",
        default_text="the model as given",
        aliases=("--alias",),
    )
    revision: str | None = setting(
        None,
        _NAME,
        MODEL,
        help="Branch, tag or commit of the model on the hub.",
        default_text="the main branch",
    )
    tokenizer: str | None = setting(
        None,
        text("NAME", "a tokenizer's name or folder, not empty"),
        MODEL,
        help="Hugging Face name or folder of the tokenizer.",
        default_text="the model's",
    )
    dtype: str = setting(
        "auto",
        choice(
            "auto",
            "float32",
            "bfloat16",
            "float16",
            also={"float": "float32", "half": "float16", "bf16": "bfloat16", "fp16": "float16"},
        ),
        MODEL,
        help="Number format of the weights and the KV cache.",
    )
    device: str = setting(
        "auto",
        text(
            metavar="DEVICE",
            pattern=r"auto|cpu|cuda(:[0-9]{1,3})?",
            what="auto, cpu, cuda or cuda:N",
        ),
        MODEL,
        help="Where the model runs: auto, cpu, cuda or cuda:N.",
    )
    max_model_len: int | None = setting(
        None,
        token_count(),
        MODEL,
        help="Most tokens of one request, prompt and output together; 8k is 8000, 8K is 8192.",
        default_text="what the model was trained for",
    )
    seed: int | None = setting(
        None,
        whole(least=0, most=2**63 - 1),
        MODEL,
        help="Makes requests that bring no seed of their own repeat from run to run.",
        default_text="random",
        aliases=("--default-seed",),
    )
    generation_config: str = setting(
        "auto",
        choice("auto", "none", also={"vllm": "none"}),
        MODEL,
        help="Whose defaults a request gets: the model's own, or OpenAI's.",
    )

    host: str = setting(
        "127.0.0.1",
        text(metavar="HOST", pattern=r"[0-9A-Za-z._:%-]+", what="a host name or an IP address"),
        NETWORK,
        help="Address to listen on; 0.0.0.0 or :: for all.",
    )
    port: int = setting(
        8000,
        whole(least=0, most=65_535, metavar="PORT"),
        NETWORK,
        help="Port to listen on; 0 for any free one.",
    )
    uds: str | None = setting(
        None,
        # 107 bytes are what Linux's sockaddr_un holds besides the closing zero.
        text("PATH", "a path of 1 to 107 characters", most=107),
        NETWORK,
        help="Listen on this Unix socket instead of a port.",
        default_text="none",
    )
    root_path: str = setting(
        "",
        text(
            metavar="PREFIX",
            pattern=r"(/[0-9A-Za-z._~-]+)*",
            what="empty, or a path that starts with / and does not end with one",
        ),
        NETWORK,
        help="Path under which a proxy serves us, for example /llm.",
        default_text="none",
    )
    ssl_keyfile: str | None = setting(
        None, _PATH, NETWORK, help="Private key for TLS, PEM.", default_text="no TLS"
    )
    ssl_certfile: str | None = setting(
        None,
        _PATH,
        NETWORK,
        help="Certificate for TLS with its chain, PEM.",
        default_text="no TLS",
    )
    max_connections: int = setting(
        1000,
        whole(),
        NETWORK,
        help="Most connections open at the same time.",
    )
    # JSON of this size takes at most a fifth of a second of the event loop to parse.
    max_body_size: int = setting(
        4 * 1024**2,
        byte_count(),
        NETWORK,
        help="Largest request body in bytes; a larger one is answered 413.",
        default_text="4MiB",
    )
    socket_send_buffer: int = setting(
        64 * 1024,
        byte_count(least=2048, most=MAX_INT),
        NETWORK,
        help="Bytes that the kernel may hold for one client that does not read.",
        default_text="64KiB",
    )
    keep_alive_timeout: float = setting(
        75.0,
        seconds(),
        NETWORK,
        help="Seconds that an idle connection stays open; above the 60 of common load balancers.",
    )

    api_key: tuple[str, ...] = setting(
        (),
        several(_KEY),
        ACCESS,
        help="Key that clients must send; repeat for more. Shows in the process list: prefer "
        "--api-key-file or the variable.",
        default_text="none: everyone may ask",
        secret=True,
    )
    api_key_file: str | None = setting(
        None,
        _PATH,
        ACCESS,
        help="File with further keys, one on each line; # starts a comment line.",
        default_text="none",
    )

    max_stream_buffer: int = setting(
        256 * 1024,
        byte_count(),
        STREAMS,
        help="Undelivered bytes of one stream at which its request is paused.",
        default_text="256KiB",
    )
    # Ten seconds of a fast stream: beyond any hiccup of a network, and little to compute in vain.
    max_stream_tokens: int = setting(
        512,
        token_count(),
        STREAMS,
        help="Undelivered output tokens of one stream at which its request is paused.",
    )
    commit_after: float = setting(
        10.0,
        seconds(zero=True),
        STREAMS,
        help="Seconds without a token after which a stream's headers go out all the same.",
    )
    keepalive: float = setting(
        15.0,
        seconds(zero=True),
        STREAMS,
        help="Seconds of silence after which a stream gets a comment line; 0 for never.",
        aliases=("--sse-keep-alive-interval",),
    )

    send_timeout: float = setting(
        30.0,
        seconds(),
        TIME,
        help="Seconds without progress on a client's socket after which its request ends.",
    )
    queue_timeout: float = setting(
        60.0,
        seconds(zero=True),
        TIME,
        help="Seconds that a request may wait for its first step of the engine; 0 for no limit.",
    )
    request_timeout: float = setting(
        600.0,
        seconds(),
        TIME,
        help="Seconds that one request may take in all; a request may ask for less.",
    )
    drain_timeout: float = setting(
        25.0,
        seconds(zero=True),
        TIME,
        help="Seconds that running requests get at shutdown; 0 ends them at once.",
        aliases=("--shutdown-timeout",),
    )

    log_level: str = setting(
        "info",
        choice("critical", "error", "warning", "info", "debug", also={"warn": "warning"}),
        LOGS,
        help="Least severe messages that are logged.",
    )
    log_format: str = setting(
        "text", choice("text", "json"), LOGS, help="Log lines for people or for programs."
    )
    access_log: bool = setting(
        default=True, read=switch(), group=LOGS, help="Log one line for each request."
    )

    scripted_text: str | None = setting(
        None,
        text("TEXT", "text, not empty", pattern=r"[^\x00]+", most=1_000_000),
        SCRIPT,
        help="What the scripted engine says.",
        default_text="the last message, back",
    )
    scripted_step_ms: float = setting(
        20.0, milliseconds(), SCRIPT, help="Milliseconds that each of its tokens takes."
    )

    def __attrs_post_init__(self) -> None:
        """Refuse values that are impossible together."""
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            missing = "ssl_certfile" if self.ssl_certfile is None else "ssl_keyfile"
            raise ConfigError(
                f"TLS needs --ssl-keyfile and --ssl-certfile, both; "
                f"--{missing.replace('_', '-')} is missing.",
                param=missing,
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least "
                f"--max-num-seqs ({self.max_num_seqs}): a step computes one token for each "
                f"running sequence.",
                param="max_num_batched_tokens",
            )

    @property
    def open_to_all(self) -> str | None:
        """A warning where other machines can reach the server and no key is asked for."""
        keyed = self.api_key or self.api_key_file is not None
        if keyed or self.uds is not None or _is_loopback(self.host):
            return None
        return (
            f"Anyone who can reach {self.host}:{self.port} can use this server: "
            "set --api-key-file, or listen on 127.0.0.1."
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


#: One for each field of :class:`Config`, in the order of help and docs.
SETTINGS: tuple[Setting, ...] = tuple(
    sorted(settings_of(Config), key=lambda described: GROUPS.index(described.group))
)
