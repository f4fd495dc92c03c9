"""The check at load, beyond what ``test_attention.py`` says of it."""

# ruff: noqa: E402 - what needs torch is imported after importorskip
from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.engine.tiny_models import build, tiny_config
from torch import nn

from triolet.engine import architecture, attention
from triolet.engine.architecture import check_architecture, check_logits, longest_context
from triolet.engine.attention import attend
from triolet.engine.kv import KvPool, KvShape, bytes_per_block
from triolet.engine.linear import PackedLinear, pack_linear_layers
from triolet.errors import UnsupportedModelError

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("name", "longest"), [("llama", 512), ("dynamic-rope", 512), ("long-rope", 256), ("gpt2", 512)]
)
def test_the_context_is_as_long_as_positions_do_not_depend_on_the_text_s_length(name, longest):
    assert longest_context(build(name).config) == longest


def test_one_longrope_for_one_type_of_layer_is_found():
    config = tiny_config("gemma3_text")
    sliding, full = dict(config.rope_parameters), dict(config.rope_parameters)
    config.rope_parameters = {
        "sliding_attention": sliding["sliding_attention"],
        "full_attention": full["full_attention"]
        | {"rope_type": "longrope", "original_max_position_embeddings": 48},
    }

    assert longest_context(config) == 48


def test_a_configuration_that_names_no_length_has_none():
    assert longest_context(tiny_config("bloom")) is None


def test_a_text_that_sends_a_token_to_another_expert_is_not_held_against_a_model(monkeypatch):
    """Rounding can decide between two experts that are as good as equal, in one text of many."""
    model = build("llama")
    errors = architecture._errors
    seeds = []

    def unlucky(model, dtype, seed):
        seeds.append(seed)
        return errors(model, dtype, seed) + (len(seeds) < 3)

    monkeypatch.setattr(architecture, "_errors", unlucky)
    check_logits(model)

    assert len(set(seeds)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("softcap", {"softcap": None}),
        ("softcap", {"softcap": 40.0}),
        ("sinks", {"s_aux": None}),
        ("sinks", {"s_aux": torch.ones(4)}),
        ("sinks", {"sliding_window": None}),
        ("latent", {"scaling": 0.2}),
    ],
)
def test_a_mistake_in_what_few_models_use_is_caught_at_load(monkeypatch, name, change, dtype):
    def mistaken(*args, **kwargs):
        return attend(*args, **kwargs | change)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, mistaken)
    with pytest.raises(UnsupportedModelError, match="other logits"):
        check_logits(build(name, dtype=dtype))


def test_a_model_whose_own_cache_disagrees_with_it_is_refused():
    """Its mask sees everything and its cache forgets, so ``generate`` says something else."""
    model = build("forgetful")
    check_architecture(model)

    with pytest.raises(UnsupportedModelError, match="other logits"):
        check_logits(model)


@pytest.mark.parametrize("name", ["llama", "latent", "gpt2"])
def test_a_block_costs_what_its_keys_and_values_take(name):
    config = build(name).config
    pool = KvPool(
        KvShape.of(config),
        num_blocks=3,
        block_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )

    taken = sum(pages.nbytes for pages in (*pool.key_pages, *pool.value_pages))

    assert taken == 3 * bytes_per_block(config, block_size=4, dtype=torch.float32)


class Coarse(nn.Linear):
    """A layer that rounds its inputs to steps that depend on all tokens beside each other."""

    def forward(self, inputs):
        step = inputs.abs().amax() / 127
        return super().forward((inputs / step).round() * step)


def coarse(name):
    model = build(name)
    for module in list(model.modules()):
        for child in module.children():
            if type(child) is nn.Linear:
                child.__class__ = Coarse
    model.is_quantized = True
    return model


def test_a_quantized_model_is_checked_without_its_rounding():
    """Its rounding makes more of a difference than a mistake might."""
    model = coarse("mistral")
    with torch.no_grad():
        assert architecture._errors(model, torch.float32, 1).max() > architecture._TOLERANCE

    check_logits(model)

    assert not any("forward" in vars(module) for module in model.modules())


def test_a_layer_that_was_wrapped_is_wrapped_again_after_the_check():
    model = build("llama")
    model.is_quantized = True
    layer = model.model.layers[0].mlp.up_proj
    layer.forward = wrapped = layer.forward

    check_logits(model)

    assert vars(layer)["forward"] is wrapped


@pytest.mark.parametrize("wrong", ["window", "logits"])
def test_a_mistake_in_a_quantized_model_is_caught_at_load(monkeypatch, wrong):
    model = coarse("mistral")
    if wrong == "logits":
        # Not attention: the rounding itself is so coarse that it does not even come close.
        monkeypatch.setattr(architecture, "_ROUGH_TOLERANCE", 1e-9)
    else:
        window = {"sliding_window": None}
        monkeypatch.setitem(
            attention.AttentionInterface._global_mapping,
            attention.NAME,
            lambda *args, **kwargs: attend(*args, **kwargs | window),
        )

    with pytest.raises(UnsupportedModelError, match="other logits"):
        check_logits(model)


class Foreign(nn.Parameter):
    """A weight in a format of its own, which says it is in float32."""


def test_weights_of_another_kind_are_not_packed():
    model = build("llama")
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = Foreign(layer.weight.data)

    pack_linear_layers(model)

    assert isinstance(model.model.layers[0].self_attn.k_proj, PackedLinear)
    assert model.model.layers[0].self_attn.q_proj is layer
