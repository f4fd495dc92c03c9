"""Folders whose ``config.json`` says that transformers quantized them."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

import safetensors.torch  # noqa: E402 - needs torch
from tests.engine.tiny_models import build, tiny_config  # noqa: E402 - needs torch

from triolet.engine.runner import build_runner  # noqa: E402 - needs torch
from triolet.engine.weights import load_model  # noqa: E402 - needs torch
from triolet.errors import ModelLoadError, UnsupportedModelError  # noqa: E402 - needs torch

pytestmark = pytest.mark.torch

#: Rows and columns that share one scale.
SIDE = 16


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama, and a function that changes its settings and weights."""
    path = tmp_path / "tiny"
    model = build(tiny_config("llama", initializer_range=0.05))
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())

    def change(quantization, tensors=None):
        (path / "config.json").write_text(
            json.dumps(config | {"quantization_config": quantization})
        )
        if tensors is not None:
            safetensors.torch.save_file(
                tensors, path / "model.safetensors", metadata={"format": "pt"}
            )
        return str(path)

    change.model = model
    return change


def load(source):
    lines = []
    return load_model(source, progress=lines.append), lines


def in_eight_bits(model):
    """The state of a model as fine-grained FP8 checkpoints have it: blocks and their scales."""
    tensors = {}
    for name, weight in model.state_dict().items():
        if "proj" not in name:
            tensors[name] = weight.clone()
            continue
        rows, columns = (size // SIDE for size in weight.shape)
        blocks = weight.reshape(rows, SIDE, columns, SIDE)
        scale = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        tensors[name] = (blocks / scale).reshape(weight.shape).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale.reshape(rows, columns)
    return tensors


@pytest.mark.slow
def test_eight_bit_floats_load_on_the_cpu_as_what_they_stand_for(folder):
    pytest.importorskip("accelerate", reason="transformers asks for it to load them")
    model = folder.model
    source = folder(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [SIDE, SIDE],
        },
        in_eight_bits(model),
    )

    loaded, _ = load(source)

    assert loaded.dtype == "float32"
    ids = torch.tensor([[5, 6, 7, 8]])
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected, got = model(ids).logits, loaded.model(ids).logits
    assert 0 < (got - expected).norm() / expected.norm() < 0.1
    build_runner(loaded.model, num_blocks=4, block_size=16, max_num_seqs=1)


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"\(quantized with gptq\).*optimum|gptqmodel"),
        ({"quant_method": "hqq"}, r"\(quantized with hqq\)"),
        ({"load_in_8bit": True}, r"\(quantized with bitsandbytes\)"),
        ({"quant_method": "higgs"}, r"\(quantized with higgs\).*only supported on GPU"),
        ({}, "no `quant_method`"),
        ([], "cannot be loaded"),
    ],
)
def test_what_cannot_be_loaded_here_says_what_it_is_and_what_it_needs(
    folder, tmp_path, quantization, reason
):
    with pytest.raises(ModelLoadError, match=reason) as refused:
        load(folder(quantization))

    assert str(tmp_path) not in refused.value.message


def test_a_kind_that_transformers_would_skip_is_refused(folder):
    with pytest.raises(UnsupportedModelError, match="'of-tomorrow', which this version"):
        load(folder({"quant_method": "of-tomorrow"}))


@pytest.mark.slow
def test_the_context_of_a_longrope_model_ends_where_its_frequencies_change(tmp_path):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    config = tiny_config("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    build(config).save_pretrained(tmp_path / "tiny")

    loaded, lines = load(str(tmp_path / "tiny"))

    assert loaded.max_model_len == 64
    assert any("64 tokens, not 128" in line for line in lines)
