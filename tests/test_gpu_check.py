"""The script that checks a GPU, run where there is none: its own code at least must be right."""

# ruff: noqa: E402 - what needs torch is imported after importorskip
from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from scripts import gpu_check

from triolet.engine import varlen

pytestmark = [pytest.mark.torch, pytest.mark.slow]

#: One that is read in place with windows, and one that is gathered whatever the device.
FAMILIES = ("mistral", "gemma2")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(tmp_path, monkeypatch, *families):
    monkeypatch.setenv("OUT", str(tmp_path))
    status = gpu_check.main(["--dry-run", "--families", *families])
    return status, json.loads((tmp_path / "gpu_check.json").read_text())


def test_a_dry_run_passes_and_reports(tmp_path, monkeypatch):
    status, report = run(tmp_path, monkeypatch, *FAMILIES)

    assert (status, report["failed"]) == (0, [])
    assert set(report["results"]) == {
        *("environment", "kernel", "waits", "sizing", "speed"),
        *FAMILIES,
    }
    assert any(name.endswith("graphs") for name in report["results"]["speed"])
    assert "0 of 7 parts failed" in (tmp_path / "gpu_check.txt").read_text()
    # The stand-ins are gone.
    assert varlen.find_kernel() is None or torch.cuda.is_available()


def test_a_kernel_that_is_wrong_fails_its_parts_and_no_other(tmp_path, monkeypatch):
    right = gpu_check.plain_varlen

    def wrong(*arguments, window_size, **options):
        left, ahead = window_size
        return right(*arguments, window_size=(left + 1 if left > 0 else left, ahead), **options)

    monkeypatch.setattr(gpu_check, "plain_varlen", wrong)

    status, report = run(tmp_path, monkeypatch, *FAMILIES)

    assert (status, report["failed"]) == (1, ["mistral"])
