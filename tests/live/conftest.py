"""Real servers. Each test says by its fixture which one it needs."""

from __future__ import annotations

from contextlib import ExitStack

import attrs
import pytest
from tests.live.fronts import HYPERCORN, Front, serving
from tests.live.processes import LOAD_PATIENCE_S, SCRIPTED, SERVE, Answer, ServerProcess, running

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def start_process(tmp_path):
    """Starts a command as a server; whatever is left of it is killed after the test.

    The test fails if a traceback is in its log, unless it expects one.
    """
    started = []
    with ExitStack() as stack:

        def start(*command, traceback=False, **env):
            log = tmp_path / f"{len(started)}.log"
            server = stack.enter_context(running(log, command, **env))
            started.append((server, traceback))
            return server

        yield start
    for server, traceback in started:
        assert ("Traceback" in server.log()) is traceback, server.log()


@pytest.fixture
def start_scripted(start_process):
    """Starts ``triolet serve --engine scripted`` with further flags."""

    def start(*flags):
        server = start_process(*SCRIPTED, *flags)
        server.wait_listening()
        server.wait_ready()
        return server

    return start


@attrs.frozen
class ModelServer:
    """``triolet serve``, ready."""

    process: ServerProcess
    model: str
    #: What it said before its model was loaded.
    early_ready: Answer
    early_health: Answer
    early_chat: Answer


@pytest.fixture(scope="session")
def model_server(tmp_path_factory):
    """The packaged model, loaded once for all tests."""
    log = tmp_path_factory.mktemp("model") / "log"
    with running(log, SERVE) as process:
        process.wait_listening()
        ready, health = process.ask("GET", "/ready"), process.ask("GET", "/health")
        chat = process.ask("POST", "/v1/chat/completions", {"model": "any", **CHAT})
        process.wait_ready(LOAD_PATIENCE_S)
        model = process.ask("GET", "/v1/models").json()["data"][0]["id"]
        yield ModelServer(process, model, ready, health, chat)
    assert "Traceback" not in process.log()


@pytest.fixture(scope="session")
def triolet_serve(tmp_path_factory):
    """``triolet serve``, shared by all tests that leave it as they found it."""
    with serving(SERVE, tmp_path_factory.mktemp("serve")) as front:
        yield front
    for server in (front.plain, front.tls):
        assert "Traceback" not in server.log(), server.log()


@pytest.fixture(scope="session")
def hypercorn(tmp_path_factory):
    """The plain ``hypercorn`` command, likewise."""
    with serving(HYPERCORN, tmp_path_factory.mktemp("hypercorn")) as front:
        yield front


@pytest.fixture(params=["triolet serve", "hypercorn"])
def front(request) -> Front:
    """Each of the two ways to serve."""
    return request.getfixturevalue(request.param.replace(" ", "_"))
