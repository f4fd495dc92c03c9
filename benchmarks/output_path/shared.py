"""What both sides of the benchmark share: the ids, the cases, the clock and the check."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

#: Texts of several scripts, so that characters are split over tokens as they are in life.
TEXT = (
    "The lighthouse keeper counted the ships, one by one, until the fog took them. "
    "Die Möwen über dem Hafen schrien; niemand hörte zu. "
    "灯塔看守人数着船只,直到雾把它们带走。"
    "काले बादल समुद्र पर छा गए। "
    "He wrote: «никто не пришёл» 🌊🚢👩‍👩‍👧 and closed the book.\n"
)
STOPS = ("\n\nHuman:", "<|endofturn|>", "THE END", "lighthouse burned")
TOP = 5
#: Tokens of one case, over all its requests.
TOKENS = 30_000
#: Tokens of one measured window, over all requests of the case.
WINDOW = 2_000

Output = TypeVar("Output")


class Case(NamedTuple):
    """What the requests ask for."""

    name: str
    stops: tuple[str, ...] = ()
    #: With each token so many of the most likely ones; ``None`` for no logprobs.
    top: int | None = None
    #: Requests with one token each in every engine step.
    requests: int = 1


CASES = (
    Case("plain"),
    Case("4 stops", STOPS),
    Case("4 stops, 5 logprobs", STOPS, TOP),
    Case("32 x plain", requests=32),
    Case("32 x 4 stops", STOPS, requests=32),
    Case("32 x 4 stops, 5 logprobs", STOPS, TOP, requests=32),
)


class Side(Protocol[Output]):
    """One server's output path, for the requests of one case."""

    def outputs(self, token_id: int, *, last: bool) -> list[Output]:
        """What the engine says in one step: this id for every request."""

    def step(self, outputs: list[Output], sent: list[list[bytes]]) -> None:
        """Take one step's outputs; add the bytes for each request's socket."""


class Opener(Protocol):
    """Starts the requests of a case."""

    def __call__(self, case: Case) -> Side[Any]:
        """A side with its requests begun."""


def alternatives(token_id: int) -> list[int]:
    """Made-up runners-up of a token."""
    return [(token_id + 7 * k) % 40_000 + 100 for k in range(TOP)]


def main(open_side: Opener) -> None:
    """Run all cases and print a JSON object: name of the case to its figures."""
    text_ids: list[int] = json.loads(Path(sys.argv[2]).read_text())
    print(json.dumps({case.name: measure(case, open_side(case), text_ids) for case in CASES}))


def measure(case: Case, side: Side[Any], text_ids: list[int]) -> dict[str, object]:
    """Feed whole texts to every request and time it, window by window."""
    ids = text_ids * (TOKENS // case.requests // len(text_ids))
    sent: list[list[bytes]] = [[] for _ in range(case.requests)]
    windows = []
    steps = WINDOW // case.requests
    for start in range(0, len(ids), steps):
        batch = [
            side.outputs(ids[place], last=place == len(ids) - 1)
            for place in range(start, min(start + steps, len(ids)))
        ]
        # Not the wall clock: what else the machine does is nobody's cost.
        began = time.process_time()
        for outputs in batch:
            side.step(outputs, sent)
        took = time.process_time() - began
        if len(batch) == steps:
            windows.append(took / steps / case.requests * 1e6)
    streams = [b"".join(stream) for stream in sent]
    return {
        "first": windows[0],
        "last": windows[-1],
        "best": min(windows),
        **facts(streams, len(ids), case.top),
    }


def facts(streams: list[bytes], tokens: int, top: int | None) -> dict[str, object]:
    """What the bytes say, so that the two sides can be compared.

    Raises:
        AssertionError: There is not one logprob for each token, with its runners-up.
    """
    texts, spelled, events = [], True, 0
    for stream in streams:
        frames = [frame for frame in stream.split(b"\n\n") if frame.startswith(b"data: {")]
        choices = [json.loads(frame[6:])["choices"][0] for frame in frames]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        texts.append(text)
        events += len(choices)
        if top is not None:
            # A choice may be opened by an event that says nothing yet.
            said = [one["logprobs"]["content"] for one in choices if one["logprobs"]]
            scored = list(itertools.chain.from_iterable(said))
            assert len(scored) == tokens, (len(scored), tokens)
            assert all(len(one["top_logprobs"]) == top for one in scored)
            data = itertools.chain.from_iterable(one["bytes"] or () for one in scored)
            spelled = spelled and bytes(data) == text.encode()
    return {
        "text": hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16],
        "characters": sum(map(len, texts)),
        "events": events,
        "bytes": sum(map(len, streams)),
        "spelled": spelled if top is not None else None,
    }
