"""Figures for people and for programs."""

from __future__ import annotations

import json

import attrs

from triolet.client.figures import CANCELLED, COMPLETED, RequestResult
from triolet.client.load import Load
from triolet.client.report import Report

DONE = RequestResult(
    number=1,
    intended_s=0.0,
    sent_s=0.001,
    ended_s=0.5,
    end=COMPLETED,
    arrivals_s=(0.1, 0.2, 0.4),
    writes=2,
    bytes_read=600,
    prompt_tokens=10,
    cached_tokens=4,
    output_tokens=4,
)
LEFT = RequestResult(number=0, intended_s=0.0, sent_s=0.0, ended_s=0.4, end=CANCELLED)
FAILED = attrs.evolve(LEFT, number=2, end="refused:429:queue_full", detail="Full.")


def report(*results, **more):
    return Report("http://h/v1", "m", "chat", Load(requests=3), results, 0.125, **more)


def test_the_table_says_what_was_asked_and_what_came():
    table = report(DONE, LEFT, FAILED, stopped=True).table()

    assert table.startswith("http://h/v1  m  chat\n3 requests, stopped after 3, closed loop, 1 at")
    for said in (
        "1 completed, 1 cancelled, 1 refused:429:queue_full; 2 without a token; in 0.50 s",
        "8.0 output tok/s, 28.0 tok/s in all, 2.00 requests/s",
        "10.0 in (4.0 cached), 4.0 out per completed request; from usage",
        "1.33 tokens per event, 2.00 per write, 300 bytes per write",
        "12% of one core, sent 0.0 ms late (p50), 1.0 ms (max)",
        "refused:429:queue_full: Full.",
    ):
        assert said in table
    rows = {line[:14].strip(): line[14:].split() for line in table.splitlines()}
    assert rows["TTFT ms"] == ["100.0", "100.0", "100.0", "100.0", "100.0", "1"]
    assert rows["ITL ms"] == ["150.0", "190.0", "199.0", "200.0", "150.0", "2"]
    assert rows["TPOT ms"][0] == "100.0"
    assert rows["end to end ms"][3] == "500.0"


def test_the_table_says_where_tokens_are_events():
    table = report(attrs.evolve(DONE, output_tokens=None)).table()

    assert "events counted as tokens in 1 of 1: the server gave no usage" in table


def test_a_table_of_nothing_is_a_table():
    assert report().table().count("-") >= 24


def test_the_object_is_json_and_has_every_request_in_order():
    written = json.loads(json.dumps(report(DONE, LEFT).as_json()))

    assert [request["number"] for request in written["requests"]] == [0, 1]
    assert written["requests"][1]["arrivals_s"] == [0.1, 0.2, 0.4]
    assert written["requests"][1]["ttft_s"] == 0.1
    assert written["figures"]["ends"] == {COMPLETED: 1, CANCELLED: 1}
    assert written["load"]["requests"] == 3
    assert written["format"] == 1
