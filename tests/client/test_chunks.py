"""What one event says, whoever wrote it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.client.chunks import TokenCounts, read_deltas, read_usage

KEYS = st.sampled_from(["choices", "delta", "content", "text", "index", "usage", "prompt_tokens"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow  # a hundred examples
@given(st.dictionaries(KEYS, JSON, max_size=4))
def test_reading_never_fails(data):
    for delta in read_deltas(data):
        assert delta.choice >= 0
    read_usage(data)


@pytest.mark.parametrize(
    ("choice", "text", "reasoning", "reason", "visible"),
    [
        ({"index": 0, "delta": {"role": "assistant", "content": ""}}, "", "", None, False),
        ({"index": 0, "delta": {"role": "assistant", "content": None}}, "", "", None, False),
        ({"delta": {"content": "a"}, "finish_reason": "stop"}, "a", "", "stop", True),
        ({"index": 2, "text": "b", "finish_reason": ""}, "b", "", None, True),
        ({"delta": {"reasoning_content": "hm"}}, "", "hm", None, True),
        ({"delta": {"reasoning": "hm", "content": None}}, "", "hm", None, True),
        ({"delta": {"tool_calls": [{"index": 0}]}}, "", "", None, True),
        ({"delta": None, "finish_reason": "length"}, "", "", "length", False),
    ],
)
def test_a_choice_is_read_in_every_dialect(choice, text, reasoning, reason, visible):
    (delta,) = read_deltas({"choices": [choice]})

    assert (delta.text, delta.reasoning, delta.finish_reason, delta.visible) == (
        text, reasoning, reason, visible,
    )  # fmt: skip
    assert delta.choice == choice.get("index", 0)
    assert delta.data == choice


def test_usage_takes_what_is_there():
    assert read_usage({"usage": None}) is None
    assert read_usage({"usage": {}}) is None
    assert read_usage({
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": None,
        }
    }) == TokenCounts(3, 2, 1, None)
    assert read_usage({"usage": {"prompt_tokens": True, "completion_tokens": 2}}) == TokenCounts(
        None, 2
    )
