"""Hypothesis strategies that several test folders share."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar

from hypothesis import strategies as st

Data = TypeVar("Data", str, bytes)


def chunked(data: Data) -> st.SearchStrategy[tuple[Data, ...]]:
    """Cut text or bytes into pieces whose concatenation is ``data``.

    At random places (empty pieces included), at no place, and at every single place. A machine
    that reads text or bytes must give the same result for all of them.
    """
    places = st.lists(st.integers(0, len(data)), max_size=16).map(sorted)
    return st.one_of(
        st.just(every_place(data)),
        st.just((data,)),
        places.map(lambda cuts: cut_at(data, cuts)),
    )


def every_place(data: Data) -> tuple[Data, ...]:
    """Cut ``data`` into pieces of one character or byte."""
    return tuple(data[place : place + 1] for place in range(len(data)))


def cut_at(data: Data, places: list[int]) -> tuple[Data, ...]:
    """Cut ``data`` at the given places, in ascending order; a repeated place cuts nothing off."""
    bounds = [0, *places, len(data)]
    return tuple(data[start:end] for start, end in pairwise(bounds))
