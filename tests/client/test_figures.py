"""Definitions, held."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.client.figures import (
    CANCELLED,
    COMPLETED,
    UNMARKED,
    RequestResult,
    figure,
    percentile,
    spread,
)

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


def result(*arrivals, end=COMPLETED, sent=0.0, ended=None, intended=None, **more):
    return RequestResult(
        number=0,
        intended_s=sent if intended is None else intended,
        sent_s=sent,
        ended_s=(arrivals[-1] if arrivals else sent) if ended is None else ended,
        end=end,
        arrivals_s=arrivals,
        **more,
    )


@pytest.mark.slow  # a hundred examples
@given(SAMPLES)
def test_a_spread_is_ordered_and_inside_its_samples(samples):
    found = spread(samples)

    assert found.samples == len(samples)
    assert min(samples) <= found.p50 <= found.p90 <= found.p99 <= found.max == max(samples)
    assert min(samples) <= found.mean <= max(samples)


@given(SAMPLES, st.floats(0, 100), st.floats(0, 100))
def test_percentiles_never_fall(samples, one, other):
    ranked = sorted(samples)
    low, high = sorted((one, other))

    assert percentile(ranked, low) <= percentile(ranked, high)


def test_percentiles_are_those_of_numpy():
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0], 90) == pytest.approx(3.7)
    assert percentile([5.0], 99) == 5.0


def test_nothing_has_no_spread():
    assert spread([None, None]) is None


def test_times_of_one_request():
    one = result(1.0, 1.5, 3.0, sent=0.25, ended=3.5, output_tokens=5)

    assert one.ttft_s == 0.75
    assert one.gaps_s == (0.5, 1.5)
    assert one.tpot_s == 2.0 / 4  # by the server's tokens, not by events
    assert one.end_to_end_s == 3.25


def test_an_open_loop_counts_from_the_intended_time():
    late = result(3.0, sent=2.0, intended=0.5)

    assert late.ttft_s == 2.5
    assert late.end_to_end_s == 2.5
    assert figure([late]).send_lag_s.max == 1.5


def test_one_token_has_no_tpot_and_a_failure_has_no_end_to_end():
    assert result(1.0).tpot_s is None
    broken = result(1.0, 2.0, end="truncated")
    assert (broken.tpot_s, broken.end_to_end_s) == (None, None)
    assert (broken.ttft_s, broken.gaps_s) == (1.0, (1.0,))


def test_failed_and_cancelled_requests_are_counted_in_what_they_have():
    figures = figure([
        result(1.0, 2.0, output_tokens=2),
        result(4.0, 5.0, end=CANCELLED, ended=6.0),
        result(end="refused:429:queue_full"),
        result(2.0, end=UNMARKED, output_tokens=1),
    ])

    assert figures.ends == {
        COMPLETED: 1,
        CANCELLED: 1,
        "refused:429:queue_full": 1,
        UNMARKED: 1,
    }
    assert (figures.requests, figures.completed, figures.silent) == (4, 2, 1)
    assert figures.ttft_s.samples == 3
    assert figures.ttft_s.max == 4.0
    assert figures.itl_s.samples == 2
    assert (figures.tpot_s.samples, figures.end_to_end_s.samples) == (1, 2)
    assert figures.output_tokens == 5
    assert figures.output_tokens_per_s == 5 / 6.0
    assert figures.requests_per_s == 2 / 6.0


def test_tokens_come_from_usage_and_else_from_events():
    figures = figure([
        result(1.0, 2.0, output_tokens=6, writes=1, bytes_read=300),
        result(1.0, 2.0, writes=2, bytes_read=300),
    ])

    assert figures.counted_by_events == 1
    assert figures.mean_output_tokens == 4.0
    assert figures.tokens_per_event == 8 / 4
    assert figures.tokens_per_write == 8 / 3
    assert figures.bytes_per_write == 200.0


def test_requests_in_flight_are_an_average_over_the_run():
    assert figure([result(2.0), result(4.0, sent=2.0)]).mean_concurrency == 1.0
    assert figure([result(2.0), result(2.0)]).mean_concurrency == 2.0


def test_nothing_at_all_is_zeros():
    figures = figure([])

    assert (figures.requests, figures.duration_s, figures.output_tokens_per_s) == (0, 0.0, 0.0)
    assert figures.ttft_s is figures.itl_s is figures.tpot_s is figures.end_to_end_s is None
