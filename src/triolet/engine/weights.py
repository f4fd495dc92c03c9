"""Loads a model: from a folder of safetensors, a hub id, or a GGUF file.

All that is not the model itself (how long, how wide, what ends a text) is read here once and
handed on as plain values. Pickles are never opened and code of a repository is never run.

A GGUF file of the Llama architecture takes our own path: transformers needs half a minute for
what takes two seconds here. There is no cache of converted weights, because that would save
little more than it could get wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from safetensors import SafetensorError

from triolet.engine.gguf import GgufFile, MetadataValue, open_gguf
from triolet.errors import ConfigError, ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    Progress = Callable[[str], None]

DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
#: What is fetched of a hub repository: settings, tokenizer and weights, nothing that can run.
HUB_FILES: Final = ("*.json", "*.jinja", "merges.txt", "tokenizer.model", "model*.safetensors")
#: Untyped on purpose: upstream's annotations forget what ``output_loading_info`` returns.
_AUTO: Final[Any] = transformers.AutoModelForCausalLM
#: What transformers, torch and safetensors raise for files that are not as they should be.
_LOAD_ERRORS: Final = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)

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


@attrs.frozen(eq=False)
class LoadedWeights:
    """A model ready to compute, and what was learnt on the way; fields as in ``ModelInfo``."""

    #: In eval mode, without gradients, on its device.
    model: transformers.PreTrainedModel = attrs.field(repr=False)
    #: The local folder or file it came from; the tokenizer is there too.
    path: Path
    #: Positions the model was made for, prompt and output together.
    max_model_len: int
    #: The width of the logits.
    vocab_size: int
    eos_token_ids: frozenset[int]
    architecture: str
    dtype: str
    device: str
    #: Set for a GGUF file: what the tokenizer is built from.
    gguf_metadata: Mapping[str, MetadataValue] | None = attrs.field(default=None, repr=False)


def load_model(
    source: str,
    *,
    progress: Progress,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    attn_implementation: str = "triolet",
) -> LoadedWeights:
    """Load a model. Blocks for seconds to minutes: call it from a thread.

    Args:
        source: A folder with ``config.json`` and safetensors, a ``.gguf`` file, or a hub id.
        progress: Called with a line of text as the work goes on.
        dtype: ``bfloat16``, ``float16``, ``float32``, or ``auto``: float32 on the CPU, and the
            model's own on CUDA (bfloat16 for GGUF, which has none).
        device: ``cpu``, ``cuda``, ``cuda:N``, or ``auto``: CUDA where there is any.
        revision: Branch, tag or commit of a hub id.
        attn_implementation: A name registered with transformers' ``AttentionInterface``.

    Raises:
        ConfigError: ``dtype`` or ``device`` names nothing that is there.
        ModelLoadError: Files are missing, broken or not safe, or the hub cannot be reached.
        UnsupportedModelError: The model would be computed wrongly.
    """
    place = _device(device)
    kind = _dtype(dtype, place)
    path = Path(source)
    metadata: Mapping[str, MetadataValue] | None = None
    model: transformers.PreTrainedModel
    # Their bar writes to a terminal that is ours; ``progress`` says the same in one line.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # theirs
    if path.is_file() or path.suffix == ".gguf":
        with open_gguf(path) as file:
            metadata = file.metadata
            model = _load_gguf(file, kind or torch.bfloat16, attn_implementation, progress)
    else:
        if not path.is_dir():
            path = _download(source, revision, progress)
        model = _load_folder(path, kind, attn_implementation, progress)
    if place.type != "cpu":
        progress(f"Moving the weights to {place}")
    torch.nn.Module.to(model, place)
    model.train(mode=False).requires_grad_(requires_grad=False)
    return _describe(model, path, metadata)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in {"cpu", "cuda"}:
        raise ConfigError(f"device is {name!r}; it must be auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, and torch sees {torch.cuda.device_count()} GPUs.")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype | None:
    """``None`` means the model's own."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; it must be auto or one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def _describe(
    model: transformers.PreTrainedModel,
    path: Path,
    metadata: Mapping[str, MetadataValue] | None,
) -> LoadedWeights:
    config = model.config.get_text_config()
    max_model_len = getattr(config, "max_position_embeddings", None)
    if not isinstance(max_model_len, int):
        raise UnsupportedModelError("The model's config names no max_position_embeddings.")
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # theirs
    weight = getattr(head, "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise UnsupportedModelError("The model has no output layer over a vocabulary.")
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = config.eos_token_id
    return LoadedWeights(
        model=model,
        path=path,
        max_model_len=max_model_len,
        vocab_size=weight.shape[0],
        eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or ()),
        architecture=type(model).__name__,
        dtype=str(weight.dtype).removeprefix("torch."),
        device=str(weight.device),
        gguf_metadata=metadata,
    )


def _download(source: str, revision: str | None, progress: Progress) -> Path:
    progress(f"Fetching {source} from the hub, unless it is here already")
    try:
        return Path(
            snapshot_download(source, revision=revision, allow_patterns=list(HUB_FILES)),
        )
    except (OSError, HFValidationError) as error:
        raise ModelLoadError(
            f"{source!r} is neither a file or folder here nor a model on a hub that can be"
            " reached; check the name and the network, or give a local folder or .gguf file."
        ) from error


def _load_folder(
    folder: Path, dtype: torch.dtype | None, attn_implementation: str, progress: Progress
) -> transformers.PreTrainedModel:
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder.name} has no config.json, so it is not a model folder.")
    if not any(folder.glob("*.safetensors")):
        pickles = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        raise ModelLoadError(
            f"{folder.name} has only pickled weights, which can run code and are never opened;"
            " convert them to safetensors."
            if pickles
            else f"{folder.name} has no .safetensors file."
        )
    progress(f"Reading {folder.name}")
    try:
        model, report = _AUTO.from_pretrained(
            str(folder),
            dtype=dtype or "auto",
            attn_implementation=attn_implementation,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except _LOAD_ERRORS as error:
        raise _unreadable(folder, error) from error
    # transformers fills a gap with random numbers and a warning; a server must not.
    missing = sorted(report["missing_keys"])
    if missing or report["mismatched_keys"]:
        raise ModelLoadError(
            f"{folder.name} is incomplete: its weights lack or misfit"
            f" {missing[0] if missing else min(report['mismatched_keys'])[0]}."
        )
    return cast("transformers.PreTrainedModel", model)


def _load_gguf(
    file: GgufFile, dtype: torch.dtype, attn_implementation: str, progress: Progress
) -> transformers.PreTrainedModel:
    if file.metadata.get("split.count", 0) not in {0, 1}:
        raise ModelLoadError(f"{file.path.name} is one part of several; merge them first.")
    architecture = file.metadata.get("general.architecture")
    size = file.path.stat().st_size
    progress(f"Reading {file.path.name} ({size / 1e6:,.0f} MB)")
    try:
        if architecture == "llama":
            return _build_llama(file, dtype, attn_implementation)
        progress(f"GGUF of architecture {architecture} goes through transformers, which is slow")
        model = _AUTO.from_pretrained(
            str(file.path.parent),
            gguf_file=file.path.name,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=False,
            local_files_only=True,
        )
    except _LOAD_ERRORS as error:
        raise _unreadable(file.path, error) from error
    return cast("transformers.PreTrainedModel", model)


def _unreadable(path: Path, error: Exception) -> ModelLoadError:
    reason = str(error).strip().split("\n", 1)[0].rstrip(".") or type(error).__name__
    return ModelLoadError(f"{path.name} cannot be loaded: {reason}.")


def _build_llama(
    file: GgufFile, dtype: torch.dtype, attn_implementation: str
) -> transformers.PreTrainedModel:
    """Build the module without storage, then give it the dequantised tensors as they are."""
    config = _llama_config(file)
    with torch.device("meta"):
        model: Any = _AUTO.from_config(config, attn_implementation=attn_implementation)
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


def _read_llama(file: GgufFile, name: str, config: Any) -> torch.Tensor:  # noqa: ANN401 - as _AUTO
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
