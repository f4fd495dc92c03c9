"""The documentation says what the code does."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import trio
from docs import state_page
from docs.reference_pages import FOLDER, PAGES
from prometheus_client.parser import text_string_to_metric_families

from triolet.cli.main import EXIT_STARTUP, EXIT_USAGE
from triolet.config import Config
from triolet.core import CancelCause
from triolet.runtime.lifecycle import Runtime
from triolet.server.app import create_app
from triolet.testing.asgi import open_server
from triolet.testing.engine import ScriptedBackend, echo, serve_script

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def read(page):
    return (DOCS / page).read_text(encoding="utf-8")


def first_cells(page):
    """What stands between backticks in the first column of a page's tables."""
    return re.findall(r"^\| `([^`]+)` \|", read(page), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_a_written_page_is_what_its_script_writes(page):
    written = (FOLDER / page).read_text(encoding="utf-8")

    assert written == PAGES[page](), "run python docs/reference_pages.py"


@pytest.mark.parametrize("file", state_page.FILES)
def test_the_states_are_drawn_from_the_table(file):
    drawn = (state_page.FOLDER / file).read_text(encoding="utf-8")

    assert drawn == state_page.FILES[file](), "run python docs/state_page.py"


def test_the_architecture_page_names_every_part_and_no_other():
    parts = {
        path.stem
        for path in (ROOT / "src" / "triolet").iterdir()
        if not path.name.startswith("_") and (path.suffix == ".py" or path.is_dir())
    }

    assert sorted(first_cells("explanation/architecture.md")) == sorted(parts)


async def test_a_scrape_has_the_metrics_of_the_page_and_no_others(autojump_clock):
    async with open_server() as server:
        response = await server.client.request("GET", "/metrics")

    families = text_string_to_metric_families(response.body.decode())
    names = {f.name + ("_total" if f.type == "counter" else "") for f in families}
    shown = {name for name in first_cells("reference/metrics.md") if name.startswith("triolet_")}
    assert names == shown


def test_the_metrics_page_has_every_cause_of_a_cancel():
    shown = {name for name in first_cells("reference/metrics.md") if name.startswith("cancelled:")}

    assert shown == {f"cancelled:{cause.value}" for cause in CancelCause}


def test_the_api_page_has_every_route_and_no_other():
    runtime = Runtime(
        trio.sleep_forever,
        max_live_requests=1,
        max_undelivered_bytes=1,
        max_request_timeout_s=1,
        drain_timeout_s=1,
    )
    routes = {
        f"{method} {re.sub(':path', '', route.path)}"
        for route in create_app(runtime, Config()).routes
        for method in route.methods - {"HEAD"}
    }

    assert set(first_cells("reference/http-api.md")) == routes


async def test_the_stream_page_shows_a_stream_as_it_is(autojump_clock):
    async with open_server(serve_script(ScriptedBackend(echo, step_s=0.1))) as server:
        response = await server.client.request(
            "POST",
            "/v1/chat/completions",
            json_body={
                "model": "scripted",
                "stream": True,
                "stream_options": {"include_usage": True},
                "messages": [{"role": "user", "content": "Hi"}],
            },
        )

    text = re.sub(r'"id":"chatcmpl-\w+"', '"id":"chatcmpl-…"', response.body.decode())
    text = re.sub(r'"created":\d+', '"created":1795980812', text)
    shown = re.search(r"```text\n(.*?)```", read("reference/event-stream.md"), re.DOTALL)
    assert shown.group(1) == text


def test_the_exit_codes_are_those_of_the_command():
    codes = re.findall(r"^\| (\d) \|", read("reference/exit-codes.md"), re.MULTILINE)

    assert codes == ["0", "1", str(EXIT_USAGE), str(EXIT_STARTUP)]


def guide_tests():
    """The tests that the guide about testing shows."""
    blocks = re.findall(r"```python\n(.*?)```", read("how-to/test-a-streaming-app.md"), re.DOTALL)
    names = {}
    exec(compile("\n".join(blocks), "test-a-streaming-app.md", "exec"), names)
    return [thing for name, thing in names.items() if name.startswith("test_")]


@pytest.mark.parametrize("test", guide_tests(), ids=lambda test: test.__name__)
async def test_the_tests_of_the_guide_pass(test, autojump_clock):
    assert inspect.iscoroutinefunction(test)

    await test(autojump_clock)
