# ruff: noqa: E402 - what needs torch is imported after importorskip
from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import attrs
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.tiny_models import build

from triolet.engine import local, sizing
from triolet.engine.runner import TorchRunner, build_runner
from triolet.engine.sizing import cache_bytes, largest_step
from triolet.errors import ConfigError

pytestmark = pytest.mark.torch

GIB = 2**30


def size_of(**changes):
    sizes = {"total": 80 * GIB, "free": 60 * GIB, "peak": 2 * GIB, "recorded": False}
    return cache_bytes(**{"utilization": 0.9} | sizes | changes)


def test_the_cache_gets_what_model_strangers_and_steps_leave_of_the_share():
    assert size_of() == (72 - 20 - 2) * GIB
    assert size_of(recorded=True) == (72 - 20 - 4) * GIB
    assert size_of(utilization=0.5) == (40 - 20 - 2) * GIB


@pytest.mark.parametrize(
    "changes", [{"utilization": 0.2}, {"free": 9 * GIB}, {"peak": 52 * GIB}], ids=str
)
def test_a_share_that_leaves_nothing_is_refused_with_the_figures(changes):
    with pytest.raises(ConfigError, match=r"80\.0 GiB") as refused:
        size_of(**changes)

    assert refused.value.param == "gpu_memory_utilization"


@given(
    rows=st.integers(1, 40),
    budget=st.integers(1, 400),
    length=st.integers(2, 300),
    block_size=st.sampled_from([4, 16, 256]),
)
def test_the_measured_step_is_as_large_as_the_scheduler_makes_any(rows, budget, length, block_size):
    budget = max(budget, rows)
    plan = largest_step(
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_model_len=length,
        block_size=block_size,
    )

    tokens = [len(chunk.token_ids) for chunk in plan.chunks]
    assert sum(tokens) == min(budget, rows * length)
    assert len(plan.chunks) == rows == plan.samples
    assert min(tokens) >= 1
    for chunk, count in zip(plan.chunks, tokens, strict=True):
        assert chunk.start + count <= length
        assert len(chunk.blocks) == -(-(chunk.start + count) // block_size)


@pytest.mark.slow
def test_the_measured_step_runs_in_one_page():
    runner = build_runner(build("llama"), num_blocks=1, block_size=16, max_num_seqs=4)
    plan = largest_step(max_num_seqs=4, max_num_batched_tokens=50, max_model_len=64, block_size=16)

    assert len(runner.run(plan).samples) == 4


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_refused(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(sizing, "peak_bytes", fail)
    runner = object.__new__(TorchRunner)

    with pytest.raises(ConfigError, match="--max-num-batched-tokens") as refused:
        sizing.measure_cache(runner, None, torch.device("cuda"), recorded=True, utilization=0.9)

    assert refused.value.param == "max_num_batched_tokens"


@attrs.define(eq=False)
class FakeRunner:
    """Notes what it is told to do; there is no GPU behind it."""

    num_blocks: int
    capture: object
    block_size: int
    how_it_attends: str = "nobody attends"
    done: list[object] = attrs.field(factory=list)

    def resize(self, num_blocks):
        self.done.append(num_blocks)

    def warm_up(self):
        self.done.append("warm")


def on_a_gpu(monkeypatch, *, measured, **changes):
    """What :mod:`~triolet.engine.local` makes of a model on a GPU where so much is measured."""
    config = build("llama").config
    model = SimpleNamespace(config=config, dtype=torch.bfloat16, device=torch.device("cuda"))
    weights = SimpleNamespace(model=model, eos_token_ids=frozenset())
    asked = []

    def measure(runner, plan, device, **options):
        asked.append(options)
        return measured

    def make(model, *, num_blocks, block_size, capture, **_options):
        return FakeRunner(num_blocks, capture, block_size)

    monkeypatch.setattr(local, "measure_cache", measure)
    monkeypatch.setattr(local, "build_runner", make)
    plain = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": None}
    plain |= {"threads": 1, "max_model_len": 512, "kv_cache_bytes": None}
    options = local.EngineOptions(**plain | changes)
    runner, blocks = local._runner(options, weights, 512, lambda _: None)
    return runner, blocks, asked


# Of the tiny llama: 4 layers, 2 heads of 16 numbers in 2 bytes, keys and values.
PAGE_BYTES = 256 * 4 * 2 * 16 * 2 * 2


def test_on_a_gpu_the_cache_takes_what_was_measured_and_steps_are_recorded(monkeypatch):
    runner, blocks, [asked] = on_a_gpu(
        monkeypatch, measured=6 * PAGE_BYTES + 5, gpu_memory_utilization=0.7
    )

    assert asked == {"recorded": True, "utilization": 0.7}
    assert (runner.num_blocks, runner.block_size, blocks) == (1, 256, 6)
    assert runner.done == [6, "warm"]
    assert runner.capture is not None


def test_a_cache_of_a_given_size_is_not_measured(monkeypatch):
    runner, blocks, asked = on_a_gpu(monkeypatch, measured=0, kv_cache_bytes=3 * PAGE_BYTES)

    assert (runner.num_blocks, blocks, asked) == (3, 3, [])


def test_eager_means_that_nothing_is_recorded(monkeypatch):
    runner, _, [asked] = on_a_gpu(monkeypatch, measured=9 * PAGE_BYTES, enforce_eager=True)

    assert runner.capture is None
    assert not asked["recorded"]


def test_what_was_measured_must_do_for_one_request(monkeypatch):
    with pytest.raises(ConfigError, match="less than one request of --max-model-len 512"):
        on_a_gpu(monkeypatch, measured=1 * PAGE_BYTES)
