from __future__ import annotations

import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - only where torch is

from triolet.engine import linear  # noqa: E402 - only where torch is
from triolet.engine.linear import PackedLinear, pack_linear_layers  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 8, 33])
def test_a_packed_layer_computes_what_the_plain_one_does(rows, bias):
    torch.manual_seed(0)
    plain = nn.Linear(48, 72, bias=bias).requires_grad_(requires_grad=False)
    inputs = torch.randn(1, rows, 48)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(plain)(inputs), plain(inputs))


def test_only_plain_float32_layers_are_packed():
    class Doubling(nn.Linear):
        """A layer that is a Linear and does not compute one."""

    model = nn.Sequential(nn.Linear(4, 4), Doubling(4, 4), nn.Linear(4, 4).bfloat16(), nn.ReLU())
    assert pack_linear_layers(model) == 1
    assert [type(layer) for layer in model] == [PackedLinear, Doubling, nn.Linear, nn.ReLU]


def test_an_output_layer_tied_to_the_embedding_leaves_it_usable():
    model = nn.ModuleDict({"embedding": nn.Embedding(10, 6), "head": nn.Linear(6, 10, bias=False)})
    model["head"].weight = model["embedding"].weight
    before = model["embedding"](torch.tensor([3]))
    assert pack_linear_layers(model) == 1
    with torch.inference_mode():
        assert torch.equal(model["embedding"](torch.tensor([3])), before)
        logits = model["head"](before)
    torch.testing.assert_close(logits, before @ model["embedding"].weight.T)


def test_without_the_operators_layers_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = nn.Sequential(nn.Linear(4, 4))
    assert pack_linear_layers(model) == 0
    assert type(model[0]) is nn.Linear


def test_a_packed_layer_tells_its_dtype_and_poisons_whoever_computes_with_its_weight():
    layer = PackedLinear(nn.Linear(4, 6))
    assert (layer.weight.dtype, layer.weight.shape) == (torch.float32, (6, 4))
    assert (torch.ones(1, 4) @ layer.weight.T).isnan().all()


def test_each_plain_layer_is_let_go_as_soon_as_it_is_packed(monkeypatch):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    layers = [weakref.ref(layer) for layer in model]
    alive = []
    monkeypatch.setattr(linear, "TRIM_BYTES", 1)
    monkeypatch.setattr(
        linear, "trim", lambda: alive.append(sum(layer() is not None for layer in layers))
    )
    assert pack_linear_layers(model) == 3
    assert alive == [2, 1, 0]
