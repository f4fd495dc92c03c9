"""The unmodified OpenAI SDK for Node against a server on a real port.

Not among the ordinary tests, since it needs Node and a package of its registry:
``nox -s interop`` installs the one and runs these.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.live.processes import SCRIPTED, running

NODE = shutil.which("node")
MODULES = os.environ.get("TRIOLET_NODE_MODULES")
SCRIPT = Path(__file__).parent / "openai_sdk.cjs"
SAID = "Hé 👋"
#: Seconds; Node starts in one, and the SDK waits for nothing.
PATIENCE_S = 60

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(NODE is None, reason="there is no node"),
    pytest.mark.skipif(MODULES is None, reason="run by nox -s interop, which installs the SDK"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What the SDK understood of a server that says the same to everyone."""
    log = tmp_path_factory.mktemp("node") / "log"
    with running(log, (*SCRIPTED, "--scripted-text", SAID, "--scripted-step-ms", "2")) as server:
        server.wait_listening()
        server.wait_ready()
        done = subprocess.run(
            [NODE, SCRIPT, f"{server.url}/v1"],
            env={**os.environ, "NODE_PATH": MODULES},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_chats_are_read_whole_and_streamed(answers):
    assert [choice["text"] for choice in answers["chat"]] == [SAID, SAID]
    assert answers["chatStream"] == answers["chat"]
    assert {choice["finish"] for choice in answers["chat"]} == {"stop"}
    assert {len(choice["tokens"]) for choice in answers["chat"]} == {len(SAID.encode()) + 1}


def test_the_stream_helper_adds_up_text_and_logprobs(answers):
    # It tells of all choices without their indices.
    assert sorted(answers["helper"]["deltas"]) == sorted(SAID * 2)
    assert answers["helper"]["choices"] == answers["chat"]


def test_completions_are_read_whole_and_streamed(answers):
    assert [choice["text"] for choice in answers["text"]] == ["hiHé", "youHé"]
    assert answers["textStream"] == answers["text"]
    assert answers["text"][0]["tokens"] == ["<|bos|>", "h", "i", "H", "bytes:\\xc3", "bytes:\\xa9"]


def test_an_error_names_its_field(answers):
    assert answers["failure"] == {
        "status": 400,
        "param": "top_logprobs",
        "code": "invalid_request",
    }
