"""Plant bugs, one at a time, and see that the suite catches each.

    python tests/mutation/run.py [NAME ...]

Each bug of :mod:`tests.mutation.mutants` is written into a copy of the package, and the tests
that answer for the rule it breaks run against that copy. A bug that they let pass is printed,
and the exit code is 1. The tests pass on the unchanged copy first, or nothing would be shown.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutation.mutants import MUTANTS, Mutant  # noqa: E402 - found by the line above

#: A planted bug may hang the tests; none of these takes a tenth of this without one.
TIMEOUT_S = 120.0
#: Pytest's exit code for tests that ran and failed. Others are a broken set-up, and show nothing.
TESTS_FAILED = 1


def run_tests(source: Path, tests: tuple[str, ...]) -> str | None:
    """``None`` if the tests pass on that source, else in which way they do not."""
    # -P keeps the folder of the script off the path, PYTHONPATH puts the copy before the
    # installed package.
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            timeout=TIMEOUT_S,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "they hang"
    if done.returncode == 0:
        return None
    if done.returncode == TESTS_FAILED:
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0] if failed else "they fail"
    sys.exit(f"The tests could not run:\n{done.stdout}\n{done.stderr}")


def main(names: list[str]) -> int:
    """Try the bugs of these names, or all; the exit code."""
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    if not chosen:
        sys.exit(f"No bug of that name; there are {', '.join(one.name for one in MUTANTS)}.")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source)
        every_test = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        broken = run_tests(source, every_test)
        if broken is not None:
            sys.exit(f"The tests fail without a planted bug: {broken}")
        survivors = [mutant for mutant in chosen if not caught(mutant, source)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} planted bugs were caught.")
    return 1 if survivors else 0


def caught(mutant: Mutant, source: Path) -> bool:
    """Whether the tests notice the bug."""
    file = source / mutant.file
    original = file.read_text(encoding="utf-8")
    started = monotonic()
    file.write_text(mutant.applied(original), encoding="utf-8")
    try:
        how = run_tests(source, mutant.tests)
    finally:
        file.write_text(original, encoding="utf-8")
    verdict = "SURVIVES" if how is None else f"caught: {how}"
    print(f"{mutant.name} ({monotonic() - started:.0f} s): {verdict}", flush=True)
    return how is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
