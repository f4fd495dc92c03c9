"""Loads a model: from a folder of safetensors, a hub id, or a GGUF file.

All that is not the model itself (how long, how wide, what ends a text) is read here once and
handed on as plain values. Pickles are never opened and code of a repository is never run.

There is no cache of converted weights: it would save little more than it could get wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from safetensors import SafetensorError
from transformers.quantizers.auto import AutoHfQuantizer

from triolet.engine.architecture import longest_context
from triolet.engine.attention import NAME
from triolet.engine.gguf import GgufFile, MetadataValue, open_gguf
from triolet.engine.gguf_llama import build_llama
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
    attn_implementation: str = NAME,
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
    return _describe(model, path, metadata, progress)


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
    progress: Progress,
) -> LoadedWeights:
    config = model.config.get_text_config()
    max_model_len = longest_context(model.config)
    if max_model_len is None:
        raise UnsupportedModelError("The model's config names no max_position_embeddings.")
    if max_model_len < config.max_position_embeddings:
        progress(
            f"Its context is {max_model_len:,} tokens, not {config.max_position_embeddings:,}:"
            " beyond that, longrope computes all positions anew"
        )
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
        eos_token_ids=_eos_ids(eos),
        architecture=type(model).__name__,
        dtype=str(weight.dtype).removeprefix("torch."),
        device=str(weight.device),
        gguf_metadata=metadata,
    )


def _eos_ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int for item in values):
        raise ModelLoadError(f"The model's eos_token_id is {value!r}; it must be ids.")
    return frozenset(values)


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
    quantized_with = None
    try:
        quantized_with = _quantization(folder)
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
        raise _unreadable(folder, error, quantized_with) from error
    _check_complete(folder.name, report)
    return cast("transformers.PreTrainedModel", model)


def _quantization(folder: Path) -> str | None:
    """What the weights are quantized with, as their settings name it; transformers does the rest.

    Raises:
        UnsupportedModelError: Transformers would skip it with a warning, and read the numbers as
            if they were not quantized.
    """
    config = json.loads((folder / "config.json").read_bytes())
    settings = config.get("quantization_config")
    if settings is None:
        return None
    method = str(settings.get("quant_method", "bitsandbytes"))
    if not AutoHfQuantizer.supports_quant_method(settings):  # type: ignore[no-untyped-call]  # theirs
        raise UnsupportedModelError(
            f"{folder.name} is quantized with {method!r}, which this version of transformers does"
            " not know."
        )
    return method


def _check_complete(name: str, report: Mapping[str, Any]) -> None:
    """Transformers fills a gap with random numbers and drops what it has no place for."""
    missing = sorted(report["missing_keys"])
    if missing or report["mismatched_keys"]:
        raise ModelLoadError(
            f"{name} is incomplete: its weights lack or misfit"
            f" {missing[0] if missing else min(report['mismatched_keys'])[0]}."
        )
    if report["unexpected_keys"]:
        raise UnsupportedModelError(
            f"{name} holds {min(report['unexpected_keys'])}, which this architecture has no place"
            " for; without it the model would compute something else."
        )


def _load_gguf(
    file: GgufFile, dtype: torch.dtype, attn_implementation: str, progress: Progress
) -> transformers.PreTrainedModel:
    if file.metadata.get("split.count") not in (None, 0, 1):
        raise ModelLoadError(f"{file.path.name} is one part of several; merge them first.")
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        # transformers reads more, and fills what it does not find with random numbers.
        raise UnsupportedModelError(
            f"{file.path.name} is a GGUF of the architecture {architecture!r}; only llama is read"
            " from GGUF. Use the safetensors of the same model."
        )
    progress(f"Reading {file.path.name} ({file.path.stat().st_size / 1e6:,.0f} MB)")
    try:
        return build_llama(file, dtype, attn_implementation)
    except _LOAD_ERRORS as error:
        raise _unreadable(file.path, error) from error


def _unreadable(path: Path, error: Exception, quantized_with: str | None = None) -> ModelLoadError:
    reason = str(error).strip().split("\n", 1)[0].rstrip(".") or type(error).__name__
    how = f" (quantized with {quantized_with})" if quantized_with else ""
    return ModelLoadError(f"{path.name}{how} cannot be loaded: {reason}.")
