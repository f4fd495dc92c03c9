"""Puts an engine together: weights, memory, runner, scheduler."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import attrs
import psutil
import torch

from triolet.engine.architecture import check_architecture, check_logits, little_changes_in
from triolet.engine.blocks import BlockPool
from triolet.engine.graphs import CudaCapture
from triolet.engine.int8 import check_quantizable, quantize_linear_layers
from triolet.engine.kv import bytes_per_block
from triolet.engine.linear import pack_linear_layers
from triolet.engine.logprobs import DEFAULT_MAX_LOGPROBS
from triolet.engine.loop import Engine
from triolet.engine.memory import trim, use_huge_pages
from triolet.engine.prefix import PrefixIndex
from triolet.engine.runner import TorchRunner, build_runner
from triolet.engine.scheduler import Scheduler
from triolet.engine.sizing import largest_step, measure_cache
from triolet.engine.varlen import page_size
from triolet.engine.weights import LoadedWeights, load_model
from triolet.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

#: Share of the memory free after loading that the KV cache takes where no size was given. A CPU
#: shares its memory with everything else on the machine.
CPU_MEMORY_SHARE = 0.25


@attrs.frozen(kw_only=True)
class EngineOptions:
    """How much an engine may take. Counts of tokens, sequences and bytes."""

    threads: int
    #: ``None`` takes what the model was made for.
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    #: ``None`` takes what suits the device.
    block_size: int | None
    #: ``None`` sizes it by free memory.
    kv_cache_bytes: int | None
    #: Share of a GPU's memory that may be in use once the KV cache is there.
    gpu_memory_utilization: float = 0.9
    #: Whether decode steps on a GPU run kernel by kernel, and none is recorded.
    enforce_eager: bool = False
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
    if options.quantization == "int8":
        _quantize(weights.model, progress)
    pack_linear_layers(weights.model)
    runner, num_blocks = _runner(options, weights, max_model_len, progress)
    index = PrefixIndex(runner.block_size) if options.prefix_caching else None
    scheduler = Scheduler(
        BlockPool(total_blocks=num_blocks, block_size=runner.block_size, index=index),
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


def _runner(
    options: EngineOptions,
    weights: LoadedWeights,
    max_model_len: int,
    progress: Callable[[str], None],
) -> tuple[TorchRunner, int]:
    """A runner with its KV cache, and how many blocks that has."""
    device = weights.model.device
    # A model that was rounded has been compared before.
    checked = options.quantization != "none"
    block_size = options.block_size or page_size(device)
    on_gpu = device.type == "cuda"
    measured = on_gpu and options.kv_cache_bytes is None
    num_blocks, known = 1, ""  # for the measuring; it needs no more
    if not measured:
        size = options.kv_cache_bytes or _free_bytes()
        num_blocks = _num_blocks(options, weights, max_model_len, size)
        known = f"KV cache of {num_blocks * block_size:,} tokens"
    check = "" if checked else "Checking the model against transformers"
    progress("; ".join(filter(None, (check, known))))
    runner = build_runner(
        weights.model,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=options.max_num_seqs,
        eos_token_ids=weights.eos_token_ids,
        max_logprobs=options.max_logprobs,
        capture=functools.partial(CudaCapture, device)
        if on_gpu and not options.enforce_eager
        else None,
        max_model_len=max_model_len,
        checked=checked,
    )
    if measured:
        plan = largest_step(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
        )
        size = measure_cache(
            runner,
            plan,
            device,
            recorded=not options.enforce_eager,
            utilization=options.gpu_memory_utilization,
        )
        num_blocks = _num_blocks(options, weights, max_model_len, size)
        runner.resize(num_blocks)
        progress(f"KV cache of {num_blocks * block_size:,} tokens")
    if on_gpu:
        progress(f"On the GPU, {runner.how_it_attends}")
    runner.warm_up()
    return runner, num_blocks


def _num_blocks(
    options: EngineOptions, weights: LoadedWeights, max_model_len: int, size: int
) -> int:
    """Blocks of a KV cache of ``size`` bytes; where nobody asked for it, no more than is of use.

    Raises:
        ConfigError: One request would not fit.
    """
    block_size = options.block_size or page_size(weights.model.device)
    block_bytes = bytes_per_block(
        weights.model.config, block_size=block_size, dtype=weights.model.dtype
    )
    blocks_of_one = -(-max_model_len // block_size)
    num_blocks = size // block_bytes
    if options.kv_cache_bytes is None:
        num_blocks = min(num_blocks, blocks_of_one * options.max_num_seqs)
    if num_blocks < blocks_of_one:
        raise ConfigError(
            f"The KV cache has room for {num_blocks * block_size:,} tokens, less than "
            f"one request of --max-model-len {max_model_len}: give it "
            f"{blocks_of_one * block_bytes:,} bytes with --kv-cache-memory, or lower "
            "--max-model-len.",
            param="kv_cache_memory",
        )
    return num_blocks


def _free_bytes() -> int:
    return int(psutil.virtual_memory().available * CPU_MEMORY_SHARE)
