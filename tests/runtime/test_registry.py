from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st

from triolet.runtime.registry import Ended, Registry


@attrs.frozen(eq=False)
class Request:
    id: str
    owner: str = ""


def test_an_owner_finds_its_request_and_then_its_end():
    registry, request = Registry(), Request("r", "alice")
    registry.add(request)
    assert registry.find("r", "alice") is request
    registry.end(request, "finished")
    assert registry.find("r", "alice") == Ended("alice", "finished")
    assert registry.live() == ()


def test_to_all_others_it_never_was():
    registry, request = Registry(), Request("r", "alice")
    for _ in range(2):
        registry.add(request)
        assert registry.find("r", "bob") is registry.find("r", "") is None
        assert registry.find("s", "alice") is None
        registry.end(request, "failed")
        assert registry.find("r", "bob") is None


def test_ends_do_not_keep_requests_alive_and_come_once():
    registry, request = Registry(), Request("r")
    registry.end(request, "never came")
    assert registry.find("r", "") is None
    registry.add(request)
    registry.end(request, "finished")
    registry.end(request, "cancelled:timeout")
    assert registry.find("r", "") == Ended("", "finished")


@given(st.lists(st.integers(0, 30), max_size=25), st.integers(1, 5))
def test_the_last_ends_are_kept_and_no_more(ids, most):
    registry, ended = Registry(max_ended=most), []
    for turn, number in enumerate(ids):
        request = Request(f"{turn}:{number}")
        registry.add(request)
        if number % 3:
            registry.end(request, "finished")
            ended.append(request.id)
    live = [request.id for request in registry.live()]
    for turn, number in enumerate(ids):
        id_ = f"{turn}:{number}"
        found = registry.find(id_, "")
        assert (found is not None) == (id_ in live or id_ in ended[-most:])
    assert len(live) + len(ended) == len(ids)
