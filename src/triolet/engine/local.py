"""Puts an engine together: weights, memory, runner, scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import psutil
import torch

from triolet.engine.architecture import check_architecture, check_logits, little_changes_in
from triolet.engine.blocks import BlockPool
from triolet.engine.int8 import check_quantizable, quantize_linear_layers
from triolet.engine.kv import bytes_per_block
from triolet.engine.linear import pack_linear_layers
from triolet.engine.logprobs import DEFAULT_MAX_LOGPROBS
from triolet.engine.loop import Engine
from triolet.engine.memory import trim, use_huge_pages
from triolet.engine.prefix import PrefixIndex
from triolet.engine.runner import build_runner
from triolet.engine.scheduler import Scheduler
from triolet.engine.weights import LoadedWeights, load_model
from triolet.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

#: Share of the memory free after loading that the KV cache takes where no size was given.
#: A CPU shares its memory with everything else on the machine, a GPU rarely does.
CPU_MEMORY_SHARE, CUDA_MEMORY_SHARE = 0.25, 0.9


@attrs.frozen(kw_only=True)
class EngineOptions:
    """How much an engine may take. Counts of tokens, sequences and bytes."""

    threads: int
    #: ``None`` takes what the model was made for.
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    #: ``None`` sizes it by free memory.
    kv_cache_bytes: int | None
    #: Most likely ids reported per token at most.
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    #: Whether requests of a lower ``priority`` go first; else it means nothing.
    heed_priority: bool = False
    #: Whether a prompt reuses what was computed of others that begin like it.
    prefix_caching: bool = True
    #: ``none``, or ``int8``: linear layers of 8 bits, on the CPU.
    quantization: str = "none"


@attrs.frozen(eq=False)
class LocalEngine:
    """An engine ready to be driven, and the model it runs."""

    engine: Engine
    weights: LoadedWeights
    max_model_len: int


def load_engine(
    source: str,
    options: EngineOptions,
    *,
    progress: Callable[[str], None],
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
) -> LocalEngine:
    """Load a model and build an engine around it. Blocks: call it from a thread.

    Raises:
        ConfigError: A setting is impossible for this model or this machine.
        ModelLoadError: The model cannot be read.
        UnsupportedModelError: The engine would compute it wrongly.
    """
    torch.set_num_threads(options.threads)
    weights = load_model(source, progress=progress, dtype=dtype, device=device, revision=revision)
    max_model_len = _model_length(options, weights)
    check_architecture(weights.model)
    # After the facts have been read of the plain layers, before the check that runs them.
    rounded = options.quantization == "int8"
    if rounded:
        _quantize(weights.model, progress)
    pack_linear_layers(weights.model)
    num_blocks = _num_blocks(options, weights, max_model_len)
    progress(
        ("" if rounded else "Checking the model against transformers; ")
        + f"KV cache of {num_blocks * options.block_size:,} tokens"
    )
    runner = build_runner(
        weights.model,
        num_blocks=num_blocks,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        eos_token_ids=weights.eos_token_ids,
        max_logprobs=options.max_logprobs,
        checked=rounded,
    )
    index = PrefixIndex(options.block_size) if options.prefix_caching else None
    scheduler = Scheduler(
        BlockPool(total_blocks=num_blocks, block_size=options.block_size, index=index),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=max_model_len,
        eos_token_ids=weights.eos_token_ids,
        heed_priority=options.heed_priority,
    )
    trim()
    if weights.model.device.type == "cpu":
        use_huge_pages()
    engine = Engine(scheduler, runner, vocab_size=weights.vocab_size)
    return LocalEngine(engine, weights, max_model_len)


def _quantize(model: PreTrainedModel, progress: Callable[[str], None]) -> None:
    check_quantizable(model)
    progress("Checking the model against transformers before its weights are rounded")
    check_logits(model)
    with little_changes_in(model):
        count = quantize_linear_layers(model, progress=progress)
    progress(f"Quantized {count} linear layers to int8")


def _model_length(options: EngineOptions, weights: LoadedWeights) -> int:
    wanted = options.max_model_len
    if wanted is not None and wanted > weights.max_model_len:
        raise ConfigError(
            f"--max-model-len {wanted} is more than the {weights.max_model_len} tokens "
            "this model was made for.",
            param="max_model_len",
        )
    return wanted or weights.max_model_len


def _num_blocks(options: EngineOptions, weights: LoadedWeights, max_model_len: int) -> int:
    """Blocks of the KV cache: what was asked for, or what fits and is of use."""
    block_bytes = bytes_per_block(
        weights.model.config, block_size=options.block_size, dtype=weights.model.dtype
    )
    blocks_of_one = -(-max_model_len // options.block_size)
    if options.kv_cache_bytes is None:
        affordable = _free_bytes(weights.model.device) // block_bytes
        num_blocks = min(affordable, blocks_of_one * options.max_num_seqs)
    else:
        num_blocks = options.kv_cache_bytes // block_bytes
    if num_blocks < blocks_of_one:
        raise ConfigError(
            f"The KV cache has room for {num_blocks * options.block_size:,} tokens, less than "
            f"one request of --max-model-len {max_model_len}: give it "
            f"{blocks_of_one * block_bytes:,} bytes with --kv-cache-memory, or lower "
            "--max-model-len.",
            param="kv_cache_memory",
        )
    return num_blocks


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_MEMORY_SHARE)
    return int(psutil.virtual_memory().available * CPU_MEMORY_SHARE)
