from __future__ import annotations

from triolet.core import ModelInfo
from triolet.wire.models import model_body, model_list

INFO = ModelInfo(
    names=("smollm2", "default"),
    max_model_len=8192,
    vocab_size=49152,
    eos_token_ids=frozenset({2}),
    created=1764432000,
)
BODY = {
    "id": "smollm2",
    "object": "model",
    "created": 1764432000,
    "owned_by": "triolet",
    "max_model_len": 8192,
}


def test_every_served_name_is_listed():
    assert model_body(INFO, "smollm2") == BODY
    assert model_list(INFO) == {"object": "list", "data": [BODY, {**BODY, "id": "default"}]}


def test_no_model_is_listed_while_none_is_loaded():
    assert model_list() == {"object": "list", "data": []}
