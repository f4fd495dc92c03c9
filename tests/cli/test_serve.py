"""How the process is left."""

from __future__ import annotations

import os

import pytest

from triolet.cli import serve
from triolet.config import Config
from triolet.errors import EngineDownError, ModelLoadError


@pytest.fixture
def leave(monkeypatch):
    """Runs a server that stops with this failure, or none; the code that the process ends with."""

    def run(failure):
        monkeypatch.setattr(serve, "create_runtime", lambda _: None)
        monkeypatch.setattr(serve, "configure_logging", lambda **_: None)
        monkeypatch.setattr(serve, "STOP_SIGNALS", ())
        monkeypatch.setattr(serve.trio, "run", lambda *_: failure)
        monkeypatch.setattr(serve.logging, "shutdown", lambda: None)
        monkeypatch.setattr(os, "_exit", leave_at_once)
        try:
            serve.run(Config())
        except ConnectionAbortedError as left:
            return left.args[0]

    return run


def leave_at_once(code):
    raise ConnectionAbortedError(code)


@pytest.mark.parametrize(
    ("failure", "code"),
    [(None, 0), (EngineDownError("One step took too long."), 1), (RuntimeError("no memory"), 1)],
)
def test_the_process_is_left_at_once_with_its_code(leave, failure, code):
    assert leave(failure) == code


def test_a_server_that_could_not_start_says_so(leave):
    with pytest.raises(ModelLoadError):
        leave(ModelLoadError("No weights."))


def test_what_was_printed_is_out_before_the_process_is(monkeypatch, capsys):
    class Stream:
        flushed = 0

        def flush(self):
            self.flushed += 1
            raise BrokenPipeError

    streams = Stream(), Stream()
    monkeypatch.setattr(serve.sys, "stdout", streams[0])
    monkeypatch.setattr(serve.sys, "stderr", streams[1])
    monkeypatch.setattr(serve.logging, "shutdown", lambda: None)
    monkeypatch.setattr(os, "_exit", leave_at_once)
    with pytest.raises(ConnectionAbortedError):
        serve._leave(1)
    assert [stream.flushed for stream in streams] == [1, 1]
