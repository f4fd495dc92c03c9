"""A Llama model from a GGUF file: transformers' module, the file's tensors.

Transformers needs half a minute for what takes two seconds here, and reads other architectures
with gaps that it fills at random. What this path does not know of a file is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import torch
import transformers

from triolet.errors import ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    from triolet.engine.gguf import GgufFile

_LLAMA_MODULES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA_TENSORS: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
#: All of these end a text: of a sequence, of a turn, of a message.
_END_TOKENS: Final = ("eos", "eot", "eom")
#: Llama 3's long-context scaling, as one divisor per rotary frequency.
_ROPE_FACTORS: Final = "rope_freqs.weight"
#: The settings this path honours. Any other changes what the model computes, so it is refused.
_LLAMA_KEYS: Final = frozenset({
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "tensor_data_layout",
    "vocab_size",
})


def build_llama(
    file: GgufFile, dtype: torch.dtype, attn_implementation: str
) -> transformers.PreTrainedModel:
    """Build the module without storage, then give it the dequantised tensors as they are.

    Raises:
        ModelLoadError: The file is damaged or incomplete.
        UnsupportedModelError: It holds or sets something that is not computed here.
    """
    config = _llama_config(file)
    untyped: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model: Any = untyped.from_config(config, attn_implementation=attn_implementation)
    state = {
        _llama_name(file, name): _read_llama(file, name, config).to(dtype)
        for name in file.tensors
        if name != _ROPE_FACTORS
    }
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    try:
        model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise _incomplete(file) from error
    model.tie_weights()
    # Its buffers are in no file. The shapes are checked by now, so nothing here is large.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    if _ROPE_FACTORS in file.tensors:
        model.model.rotary_emb.inv_freq /= torch.from_numpy(file.read(_ROPE_FACTORS))
    return cast("transformers.PreTrainedModel", model)


def _read_llama(file: GgufFile, name: str, config: Any) -> torch.Tensor:  # noqa: ANN401 - transformers' configs are untyped
    """One tensor as transformers orders it.

    GGUF rotates neighbouring pairs of a query or key head, transformers its two halves.
    """
    values = torch.from_numpy(file.read(name))
    if name.endswith(".attn_q.weight"):
        heads = config.num_attention_heads
    elif name.endswith(".attn_k.weight"):
        heads = config.num_key_value_heads
    else:
        return values
    rows, columns = values.shape
    return values.view(heads, -1, 2, columns).transpose(1, 2).reshape(rows, columns)


def _incomplete(file: GgufFile) -> ModelLoadError:
    return ModelLoadError(f"{file.path.name} does not hold the tensors its settings ask for.")


def _llama_name(file: GgufFile, name: str) -> str:
    if name in _LLAMA_TENSORS:
        return _LLAMA_TENSORS[name]
    match name.split("."):
        case ["blk", number, part, "weight"] if part in _LLAMA_MODULES:
            return f"model.layers.{number}.{_LLAMA_MODULES[part]}.weight"
    raise UnsupportedModelError(f"{file.path.name} has a tensor {name!r} that Llama has not.")


def _llama_config(file: GgufFile) -> transformers.LlamaConfig:
    settings = {
        key.removeprefix("llama."): value
        for key, value in file.metadata.items()
        if key.startswith("llama.")
    }
    unknown = sorted(settings.keys() - _LLAMA_KEYS)
    if unknown:
        raise UnsupportedModelError(
            f"{file.path.name} sets llama.{unknown[0]}, which is not supported for GGUF;"
            " use the safetensors version of this model."
        )

    def integer(key: str, default: int | None = None) -> int:
        value = settings.get(key, default)
        if not isinstance(value, int) or value <= 0:
            raise ModelLoadError(f"{file.path.name} has no usable llama.{key}.")
        return value

    def number(key: str, default: float | None = None) -> float:
        value = settings.get(key, default)
        if not isinstance(value, float) or value <= 0:
            raise ModelLoadError(f"{file.path.name} has no usable llama.{key}.")
        return value

    heads = integer("attention.head_count")
    width = integer("embedding_length")
    rotated = integer("rope.dimension_count", width // heads)
    head_dim = integer("attention.key_length", rotated)
    if integer("attention.value_length", head_dim) != head_dim or rotated != head_dim:
        raise UnsupportedModelError(
            f"{file.path.name} rotates only part of a head, which is not supported for GGUF."
        )
    embedding = file.tensors.get("token_embd.weight")
    layers = integer("block_count")
    if embedding is None or layers > len(file.tensors):
        raise _incomplete(file)
    ends = {file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _END_TOKENS}
    return transformers.LlamaConfig(
        vocab_size=embedding.shape[0],
        hidden_size=width,
        intermediate_size=integer("feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=integer("context_length"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        # 10,000 is llama.cpp's own value where the file has none.
        rope_parameters={"rope_type": "default", "rope_theta": number("rope.freq_base", 10_000.0)},
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=None,  # the tokenizer's affair
        eos_token_id=sorted(end for end in ends if isinstance(end, int)) or None,
        pad_token_id=None,
    )
