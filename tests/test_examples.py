"""Each example runs, by itself and on its own server, and shows what its docstring promises."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("[0-9]*.py"))
MAX_LINES = 80

#: What must stand in the output, in this order.
PROMISES = {
    "01_serve_scripted_app": ["serving on http", "200: The way back is the way.", "stopped"],
    "02_stream_with_httpx": [
        "normal ended: done, 20 events",
        "slow ended: done, 20 events",
        "cut ended: truncated, 5 events",
    ],
    "03_virtual_time": ["10 s  status 200", "25 s  : keep-alive", "250 s  data: [DONE]"],
    "04_disconnect_frees": [
        "before:",
        "triolet_requests_live 0.0",
        "during:",
        "triolet_requests_live 1.0",
        "triolet_engine_batch_rows_used 1.0",
        "after:",
        "triolet_requests_live 0.0",
        "triolet_engine_batch_rows_used 0.0",
        "triolet_engine_kv_blocks_used 0.0",
        'triolet_requests_total{outcome="cancelled:disconnect"} 1.0',
    ],
    "05_openai_sdk": [
        "a whole stream: This is the scripted engine.",
        "100 output tokens",
        "left early: T",
        "refused: 400 invalid_request, param temperature",
    ],
}


def test_there_is_something_to_run():
    assert [path.stem for path in EXAMPLES] == list(PROMISES)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_to_run(path):
    text = path.read_text(encoding="utf-8")

    assert len(text.splitlines()) < MAX_LINES
    assert f"examples/{path.name}" in ast.get_docstring(ast.parse(text))


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_shows_what_it_promises(path):
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=60
    )

    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert re.search(".*".join(map(re.escape, PROMISES[path.stem])), done.stdout, re.DOTALL)
