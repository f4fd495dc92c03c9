"""``triolet serve``: the whole server in one nursery."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
import trio

from triolet.cli.models import create_runtime
from triolet.cli.notify import Supervisor
from triolet.errors import StartupError, TrioletError
from triolet.observe.logs import configure_logging
from triolet.runtime.lifecycle import Phase
from triolet.server.app import create_app
from triolet.server.listen import ListenOptions, serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from triolet.config import Config
    from triolet.core import ModelInfo
    from triolet.runtime.lifecycle import Runtime

logger = logging.getLogger(__name__)

#: What a terminal and what a supervisor (systemd, Docker, Kubernetes) sends first. One begins a
#: drain, a second one ends it.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: What readers get to write their last events once every request has ended. With the engine's
#: ``LAST_STEP_S`` before it, it stays below the two seconds that a drained server may take to exit.
GRACEFUL_TIMEOUT_S = 0.5


def run(config: Config) -> NoReturn:
    """Serve until stopped, then end the process: with 0, or with 1 where a failure stopped it.

    Raises:
        StartupError: The server could not start as asked.
    """
    configure_logging(
        level=config.log_level, log_format=config.log_format, requests=config.access_log
    )
    # One that comes before Trio listens waits: blocked, it is kept by Linux, ignored or not.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    for stop in STOP_SIGNALS:
        # What Trio puts back when it is done: a stop signal more must not kill the exit.
        signal.signal(stop, signal.SIG_IGN)
    runtime = create_runtime(config)
    failure = trio.run(_run, config, runtime)
    if isinstance(failure, StartupError):
        raise failure
    if failure is not None:
        logger.error("stopped by a failure: %s", failure)
    _leave(0 if failure is None else 1)


def _leave(code: int) -> NoReturn:
    """Exit at once, without the interpreter's shutdown.

    Around a thread in the middle of native code (a load, a step that hangs) it would abort the
    process. And it takes seconds where much was allocated, after everything has been closed.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # Whoever read it has gone, or it is closed: nothing more can be said.
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


async def _run(config: Config, runtime: Runtime) -> Exception | None:
    app = create_app(runtime, config)
    supervisor = Supervisor.found(os.environ, drain_timeout_s=config.drain_timeout)
    failure: Exception | None = None
    with trio.open_signal_receiver(*STOP_SIGNALS) as signals:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_drain_on_signals, signals, runtime, supervisor)
            try:
                async with trio.open_nursery() as server:
                    addresses = await server.start(
                        partial(
                            serve,
                            app,
                            listen_options(config),
                            shutdown_trigger=runtime.wait_stopped,
                        )
                    )
                    logger.info("listening on %s", ", ".join(addresses))
                    # Only now: a port that is in use must not leave a load in the middle of
                    # native code behind, which aborts the exit.
                    await nursery.start(runtime.run)
                    if supervisor is not None:
                        server.start_soon(supervisor.keep_told, runtime)
                    server.start_soon(_announce, runtime, addresses[0])
            except* TrioletError as group:
                failure = group.exceptions[0]
            nursery.cancel_scope.cancel(reason="the server has stopped")
    return failure or runtime.failure


async def _drain_on_signals(
    signals: AsyncIterator[int], runtime: Runtime, supervisor: Supervisor | None
) -> None:
    async for received in signals:
        draining = runtime.phase is Phase.DRAINING
        again = "again: ending them now" if draining else "draining"
        name = signal.Signals(received).name
        logger.info("%s: %s (%d requests)", name, again, runtime.live_requests)
        runtime.drain()
        if supervisor is not None:
            supervisor.tell(runtime)
        if draining:
            # All has been said, and each one more would interrupt the handler of the one before.
            for stop in STOP_SIGNALS:
                signal.signal(stop, signal.SIG_IGN)


async def _announce(runtime: Runtime, address: str) -> None:
    """Say what to try, once there is something to try."""
    await runtime.wait_started()
    model = runtime.model
    if runtime.phase is not Phase.READY or model is None:
        return
    with suppress(OSError):  # nobody has to read it
        click.echo(_greeting(model, address))


def _greeting(model: ModelInfo, address: str) -> str:
    return f"""
Serving {model.names[0]} ({model.architecture}, {model.dtype}, {model.device}) on {address}

  curl -N {address}/v1/chat/completions -H 'Content-Type: application/json' -d '
    {{"model": "{model.names[0]}", "stream": true, "max_tokens": 64,
     "messages": [{{"role": "user", "content": "What is a triolet?"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{address}/v1", api_key="none")
  for chunk in client.chat.completions.create(
      model="{model.names[0]}", stream=True,
      messages=[{{"role": "user", "content": "What is a triolet?"}}]):
      print(chunk.choices[0].delta.content or "", end="", flush=True)

  curl {address}/metrics

Documentation: docs/tutorial/index.md, or `nox -s docs` for the whole book. Ctrl-C stops.
"""


def listen_options(config: Config) -> ListenOptions:
    """Where to listen, as the configuration says."""
    return ListenOptions(
        host=config.host,
        port=config.port,
        uds=None if config.uds is None else Path(config.uds),
        certfile=None if config.ssl_certfile is None else Path(config.ssl_certfile),
        keyfile=None if config.ssl_keyfile is None else Path(config.ssl_keyfile),
        send_timeout_s=config.send_timeout,
        socket_send_buffer_bytes=config.socket_send_buffer,
        keep_alive_timeout_s=config.keep_alive_timeout,
        graceful_timeout_s=GRACEFUL_TIMEOUT_S,
        max_connections=config.max_connections,
    )
