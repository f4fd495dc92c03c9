"""What holds for every test: its time, its threads, its Hypothesis profile.

A test that takes more than a quarter of a second says so with the ``slow`` mark (or ``model`` or
``live``, which imply it). What counts is the CPU time of this process during the call: unlike
the clock on the wall it does not grow when other work shares the machine, so a limit can be
tight without failing at random. It misses a test that sleeps; that is caught by a generous
limit on the wall. CI traces every line for coverage, which makes Python code three to four times
slower, so the limits are four times as long there.
"""

from __future__ import annotations

import gc
import os
import sys
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Before anything imports torch, which reads it once: tiny tensors gain nothing from threads,
# and two cores are shared by all.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The rule is a quarter of a second on a quiet machine; caches that others have emptied and a
# slower processor get the same again before a test fails for it.
CPU_LIMIT_S = 0.5
WALL_LIMIT_S = 5.0
TRACING_FACTOR = 4
UNLIMITED_MARKS = ("slow", "model", "live")

# No deadline: Hypothesis' is wall time per example, which fails at random on a busy machine.
settings.register_profile("dev", deadline=None)
# The same examples every time: a submission fails for what it changed, never by luck. New
# examples are looked for by everyone who runs the tests, under "dev".
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="module")
def frozen_heap():
    """What other modules have left is no garbage of this one: collections leave it out."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def unicode_tables():
    """Let Hypothesis build its Unicode tables before a test is charged for them."""

    @settings(max_examples=1, database=None)
    @given(st.text())
    def warm_up(_):
        pass

    warm_up()


def over_limit(cpu_s, wall_s, *, traced):
    """The sentence that fails a test of this length, or None."""
    factor = TRACING_FACTOR if traced else 1
    if cpu_s <= CPU_LIMIT_S * factor and wall_s <= WALL_LIMIT_S * factor:
        return None
    return (
        f"took {cpu_s:.2f} s of CPU and {wall_s:.2f} s in all: make it faster, or mark it "
        "pytest.mark.slow"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = yield
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    if not any(item.get_closest_marker(mark) for mark in UNLIMITED_MARKS):
        complaint = over_limit(cpu_s, wall_s, traced=sys.gettrace() is not None)
        if complaint is not None:
            pytest.fail(complaint, pytrace=False)
    return result
