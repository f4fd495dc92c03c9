"""Draws the states of a request from the table that the runtime moves them by.

Run it after a change of :mod:`triolet.runtime.state`; a test compares the page and the picture
with what this prints.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from triolet.runtime.state import ENDED, TRANSITIONS, Move, State

FOLDER = Path(__file__).parent / "explanation"
NOTE = "<!-- Written by docs/state_page.py; do not edit. -->"

INTRODUCTION = """\
# The states of a request

```{image} request-states.svg
:alt: The states of a request and the moves between them; the tables below say the same.
:width: 100%
```

Every move that there is stands in one table, `triolet.runtime.state.TRANSITIONS`, and this page is
drawn from it.
A move that is not in the table is a bug, and is raised as one.
From an end no move leads on: who comes second is counted and changes nothing, since causes race.
"""

#: Pixels of the picture. Ends stand in a column of their own, the other states in a row each.
WIDTH, ROW_HEIGHT, MARGIN = 760, 96, 24
BOX_WIDTH, BOX_HEIGHT = 132, 40
LEFT, RIGHT = 40, WIDTH - BOX_WIDTH - 40

STYLE = """\
  <style>
    svg { color-scheme: light dark; font: 13px sans-serif; }
    rect { fill: light-dark(#f4f6fb, #20242c); stroke: light-dark(#4a5a80, #9db0dd); }
    rect.end { stroke-width: 3; }
    path { fill: none; stroke: light-dark(#4a5a80, #9db0dd); }
    marker path { fill: light-dark(#4a5a80, #9db0dd); }
    text { fill: light-dark(#111, #eee); }
    text.name { text-anchor: middle; font-weight: bold; }
    text.move { font-size: 12px; }
  </style>
  <defs>
    <marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
      orient="auto"><path d="M0 0L8 4L0 8z"/></marker>
  </defs>"""


class Corner(NamedTuple):
    """The upper left corner of a state's box."""

    x: float
    y: float


def corners() -> dict[State, Corner]:
    """Where each state stands."""
    living = [state for state in State if state not in ENDED]
    ends = sorted(ENDED, key=_from_above)
    height = ROW_HEIGHT * (max(len(living), len(ends)) - 1)
    placed = {}
    for x, column in ((LEFT, living), (RIGHT, ends)):
        step = height / (len(column) - 1)
        placed |= {s: Corner(x, MARGIN + step * i) for i, s in enumerate(column)}
    return placed


def _from_above(end: State) -> tuple[float, int]:
    """How far down the states stand, on average, that lead to an end: fewer lines cross so."""
    states = list(State)
    rows = [states.index(state) for (state, _), target in TRANSITIONS.items() if target is end]
    return sum(rows) / len(rows), states.index(end)


def picture() -> str:
    """The diagram, as SVG."""
    placed = corners()
    height = max(corner.y for corner in placed.values()) + BOX_HEIGHT + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}">',
        f"  {NOTE}",
        STYLE,
    ]
    lines = [
        line
        for (state, move), target in TRANSITIONS.items()
        for line in _arrow(placed[state], placed[target], move.value, ends=target in ENDED)
    ]
    parts += dict.fromkeys(lines)
    for state, (x, y) in placed.items():
        shape = ' class="end"' if state in ENDED else ""
        at, size = f'x="{x}" y="{y:g}"', f'width="{BOX_WIDTH}" height="{BOX_HEIGHT}"'
        middle = f'x="{x + BOX_WIDTH / 2}" y="{y + 25:g}"'
        parts += [
            f"  <g><title>{escape(state.__doc__ or '')}</title>",
            f'    <rect{shape} {at} rx="8" {size}/>',
            f'    <text class="name" {middle}>{state.value}</text></g>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _arrow(start: Corner, end: Corner, name: str, *, ends: bool) -> list[str]:
    """A line from one box to another and the name of its move."""
    if ends:
        x, y = start.x + BOX_WIDTH, start.y + BOX_HEIGHT / 2
        to_x, to_y = end.x, end.y + BOX_HEIGHT / 2
        # The same move leads to an end from wherever it does: its name stands there once.
        label = (end.x + BOX_WIDTH / 2 - 18, end.y - 6)
    else:
        back = end.y < start.y
        x = to_x = start.x + BOX_WIDTH * (0.7 if back else 0.3)
        y, to_y = (start.y, end.y + BOX_HEIGHT) if back else (start.y + BOX_HEIGHT, end.y)
        label = (x + 6, (y + to_y) / 2 + 4)
    return [
        f'  <path marker-end="url(#arrow)" d="M{x:g} {y:g}L{to_x:g} {to_y:g}"/>',
        f'  <text class="move" x="{label[0]:g}" y="{label[1]:g}">{name}</text>',
    ]


def page() -> str:
    """The page with the tables."""
    moves: dict[State, list[str]] = defaultdict(list)
    for (state, move), target in TRANSITIONS.items():
        moves[state].append(f"{move.value} → {target.value}")
    states = [
        f"| {state.value} | {state.__doc__} | {'<br>'.join(moves[state]) or 'an end'} |"
        for state in State
    ]
    return "\n".join([
        NOTE,
        "",
        INTRODUCTION,
        "| State | What it means | Moves |",
        "| --- | --- | --- |",
        *states,
        "",
        "| Move | When |",
        "| --- | --- |",
        *(f"| {move.value} | {move.__doc__} |" for move in Move),
        "",
    ])


#: What this script writes, by file.
FILES = {"request-states.md": page, "request-states.svg": picture}

if __name__ == "__main__":
    for name, write in FILES.items():
        (FOLDER / name).write_text(write(), encoding="utf-8")
