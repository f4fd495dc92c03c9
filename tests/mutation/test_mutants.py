"""The planted bugs still fit the code; ``tests/mutation/run.py`` shows that they are caught."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.mutation.mutants import MUTANTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_fits_the_code_and_names_tests_that_are_there(mutant):
    source = (ROOT / "src" / mutant.file).read_text(encoding="utf-8")
    ast.parse(mutant.applied(source))
    for test in mutant.tests:
        assert (ROOT / test.partition("::")[0]).exists(), test


def test_names_are_unique_and_there_are_enough():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 15
