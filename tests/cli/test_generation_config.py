from __future__ import annotations

import logging

import pytest

from triolet.cli.generation_config import default_sampling


def test_what_shapes_sampling_is_taken_and_nothing_else():
    config = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": None,
        "eos_token_id": [1, 2],
        "transformers_version": "5.24.0",
    }
    assert dict(default_sampling(config)) == {"temperature": 0.6, "top_k": 20}


def test_a_model_may_bring_nothing():
    assert dict(default_sampling({})) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", 3),
        ("temperature", "0.6"),
        ("top_p", 0),
        ("top_k", -1),
        ("repetition_penalty", 0.0),
        ("max_new_tokens", True),
        ("min_p", [0.1]),
    ],
)
def test_a_value_that_no_request_could_have_is_left_out_with_a_warning(caplog, name, value):
    with caplog.at_level(logging.WARNING):
        assert dict(default_sampling({name: value, "min_tokens": 1})) == {}
    assert name in caplog.text


def test_the_defaults_are_logged(caplog):
    with caplog.at_level(logging.INFO):
        default_sampling({"temperature": 0.6, "max_new_tokens": 2048})
    assert "temperature 0.6, max_new_tokens 2048" in caplog.text
