"""The guide to fault tests shows tests that pass, and that fail where they should."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-fault-test.md"
CODE = "\n".join(re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL))


def names_of(code):
    names = {}
    exec(compile(code, GUIDE.name, "exec"), names)
    return names


TESTS = [thing for name, thing in names_of(CODE).items() if name.startswith("test_")]


@pytest.mark.parametrize(
    "test", [one for one in TESTS if inspect.iscoroutinefunction(one)], ids=lambda one: one.__name__
)
async def test_the_tests_of_the_guide_pass(test, autojump_clock):
    await test(autojump_clock)


@pytest.mark.slow
@pytest.mark.parametrize(
    "test",
    [one for one in TESTS if not inspect.iscoroutinefunction(one)],
    ids=lambda one: one.__name__,
)
def test_the_sweeps_of_the_guide_pass(test):
    test()


def test_an_app_that_gives_nothing_back_fails_them():
    careless = names_of(CODE.replace('OPEN.discard(scope["path"])', "pass"))

    with pytest.RaisesGroup(AssertionError):
        careless["test_wherever_the_client_is_lost_nothing_is_left"]()


def test_an_app_that_is_careless_for_a_moment_is_caught_at_a_checkpoint():
    # It gives back what it holds, but only if the client stays for a second.
    late = CODE.replace("        OPEN.discard", "        began and OPEN.discard")
    late = late.replace(
        "await trio.sleep(1)\n", "await trio.sleep(1)\n                began = True\n"
    )
    careless = names_of(late.replace("    OPEN.add", "    began = False\n    OPEN.add"))

    with pytest.RaisesGroup(AssertionError) as caught:
        careless["test_wherever_the_client_is_lost_nothing_is_left"]()
    (note,) = caught.value.__notes__
    assert re.fullmatch(r"ended at checkpoint \d+, task .*; replay with at_checkpoint.*", note)
