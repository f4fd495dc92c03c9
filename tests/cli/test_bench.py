"""``triolet bench``, from its options to its exit code."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner
from tests.client.transports import AsgiTransport, PiecesTransport
from tests.live.processes import SCRIPTED, running

from triolet.cli.bench import Session, read_order, run_session
from triolet.cli.bench_options import bench
from triolet.cli.main import main
from triolet.client.figures import CANCELLED, COMPLETED
from triolet.client.load import Scale
from triolet.errors import NotFoundError
from triolet.testing.asgi import open_server
from triolet.testing.engine import ScriptedBackend, say, serve_script

URL = "http://h:1"


def order(*args):
    return read_order(bench.make_context("bench", [URL, *args]).params)


async def measured(transport, *args):
    session = Session(order(*args), transport)
    await run_session(session)
    return session.report()


def test_the_defaults_are_a_closed_loop():
    found = order()

    assert (found.load.requests, found.load.concurrency, found.load.rate) == (100, 8, None)
    assert found.fields == {"temperature": 0.0}
    assert (found.scale, found.model, found.timeout_s) == (None, None, None)


def test_names_of_other_tools_are_understood():
    theirs = order(
        *("--num-prompts", "7", "--max-concurrency", "3", "--request-rate", "2.5"),
        *("--random-input-len", "11", "--random-output-len", "12", "--num-warmups", "1"),
        *("--burstiness", "0.5", "--seed", "4", "--ignore-eos"),
    )
    ours = order(
        *("-n", "7", "-c", "3", "-r", "2.5", "--input-len", "11", "--output-len", "12"),
        *("--warmup", "1", "--burstiness", "0.5", "--seed", "4", "--extra-body"),
        '{"ignore_eos": true}',
    )

    assert theirs == ours
    assert theirs.load.concurrency == 3


def test_an_open_loop_has_no_limit_unless_told():
    assert order("--rate", "2").load.concurrency is None


def test_a_body_can_have_anything_and_wins():
    found = order("--extra-body", '{"temperature": 1, "x": [1]}', "--header", "X-A: b:c")

    assert found.fields == {"temperature": 1, "x": [1]}
    assert found.headers == {"X-A": "b:c"}
    assert order("--no-calibrate").scale == Scale()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["ftp://x"], "is no URL of a server"),
        ([URL, "--rate", "0"], "--rate"),
        ([URL, "-n", "0"], "-n"),
        ([URL, "--extra-body", "{"], "is not JSON"),
        ([URL, "--extra-body", "[]"], "must be a JSON object"),
        ([URL, "--header", "X"], "NAME: VALUE"),
        ([URL, "--shared-prefix", "64"], "must be less than --input-len"),
        ([URL, "--json", "/no/such/folder/x.json"], "is no folder"),
        ([URL, "--num-prompt", "1"], "No such option"),
        ([], "Missing argument 'URL'"),
    ],
)
def test_what_cannot_be_meant_is_exit_2_and_a_sentence(args, says):
    result = CliRunner(env={"OPENAI_BASE_URL": None}).invoke(main, ["bench", *args])

    assert result.exit_code == 2
    assert says in result.stderr


def test_help_names_every_option():
    text = CliRunner().invoke(main, ["bench", "--help"]).output

    assert all(option.opts[0] in text for option in bench.params if option.opts[0][0] == "-")


def test_the_page_has_every_option_and_no_other():
    page = Path(__file__).parents[2] / "docs" / "reference" / "bench.md"
    table = re.search(r"## Options\n(.*?)\n## ", page.read_text("utf-8"), re.DOTALL)[1]
    shown = [cell for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
             for cell in re.findall(r"`([^`]+)`", row)]  # fmt: skip
    names = [name for option in bench.params for name in (*option.opts, *option.secondary_opts)]

    assert sorted(shown) == sorted(["URL" if name == "url" else name for name in names])


async def test_a_run_is_reported_with_the_model_of_the_server(autojump_clock):
    backend = ScriptedBackend(say(), step_s=0.1)
    async with open_server(serve_script(backend)) as server:
        report = await measured(
            AsgiTransport(server.client), "-n", "4", "-c", "2", "--output-len", "3", "--warmup", "1"
        )

    assert (report.model, report.stopped) == ("scripted", False)
    assert [result.end for result in report.results] == [COMPLETED] * 4
    assert "4 completed" in report.table()


async def test_ctrl_c_reports_what_there_is(autojump_clock):
    backend = ScriptedBackend(say(times=9), step_s=1.0)
    async with open_server(serve_script(backend)) as server, trio.open_nursery() as nursery:

        async def press():
            await trio.sleep(30)
            signal.raise_signal(signal.SIGINT)

        nursery.start_soon(press)
        report = await measured(
            AsgiTransport(server.client), "-n", "9", "-c", "2", "--output-len", "12"
        )

    ends = [result.end for result in report.results]
    assert report.stopped
    assert ends.count(CANCELLED) == 2
    assert 0 < ends.count(COMPLETED) < 9


async def test_ctrl_c_before_the_first_request_has_nothing_to_report(autojump_clock):
    async with trio.open_nursery() as nursery:

        async def press():
            await trio.sleep(1)
            signal.raise_signal(signal.SIGINT)

        nursery.start_soon(press)

        assert await measured(PiecesTransport([b" ", 3600.0])) is None


async def test_a_server_without_models_is_said(autojump_clock):
    with pytest.raises(NotFoundError, match="--model"):
        await measured(PiecesTransport([b'{"data": []}']))


@pytest.mark.live
def test_the_command_measures_a_server_in_another_process(tmp_path):
    with running(tmp_path / "log", SCRIPTED) as server:
        server.wait_listening()
        server.wait_ready()
        args = ["bench", server.url, "-n", "3", "-c", "3", "--output-len", "4"]
        result = CliRunner().invoke(main, [*args, "--json", str(tmp_path / "run.json")])
        refused = CliRunner().invoke(main, [*args, "--model", "none", "--no-calibrate"])
        unknown = CliRunner().invoke(main, [*args, "--model", "none"])

    assert result.exit_code == 0, result.output
    assert "3 completed" in result.stdout
    written = json.loads((tmp_path / "run.json").read_text())
    assert len(written["requests"]) == 3
    assert (refused.exit_code, unknown.exit_code) == (1, 1)
    assert "3 refused:404:model_not_found" in refused.stdout
    assert unknown.stderr == "Error: The model 'none' is not served here; served: 'scripted'.\n"
