"""Which models the engine computes correctly, decided before the first request.

Two lines of defence. :func:`check_architecture` reads what a model says of itself and refuses,
with a reason, what is known not to work. :func:`check_logits` believes nothing: it runs the
loaded model through our attention in the ways an engine does (uneven chunks, mixed steps, decode
beside a stranger, scattered pages) and compares every logit with the model's own eager attention
and cache.
A model that fails either is not served: there is no warning and no approximation.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import linear

from triolet.core import RequestId, SamplingParams
from triolet.engine.attention import NAME
from triolet.engine.forward import compute_logits
from triolet.engine.kv import KvPool, KvShape
from triolet.engine.linear import PackedLinear
from triolet.engine.plan import Chunk
from triolet.engine.varlen import CUDA_PAGE, step_kind
from triolet.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})

#: Where configurations say that a token may see later ones.
_BIDIRECTIONAL_FLAGS: Final = ("use_bidirectional_attention", "bidirectional")

#: Largest error of any position's logits in float32. Rounding is at 1e-5 in a trained model and
#: at 2e-6 in random ones; a window off by one, or a scale ignored, was at 0.2 or above.
_TOLERANCE: Final = 1e-3
#: Median error of the positions in the model's own dtype; the median because one rounded number
#: can send a token to another expert.
_ROUGH_TOLERANCE: Final = 0.5

# The self-check. The prompt is longer than the window, the window is no multiple of the page, and
# no chunk ends where a page does.
_CHECK_WINDOW: Final = 9
_CHECK_PAGE: Final = 4
_CHECK_TOKENS: Final = 32
_CHECK_CHUNKS: Final = (18, 11, 1, 1, 1)
_STRANGER_CHUNKS: Final = (13, 1, 1, 6, 1)
#: The last tokens of the model's own run read its own cache. The rest is longer than the window.
_CHECK_CACHED: Final = 5
#: Texts tried before a model is refused. A router that is torn between two experts may send a
#: token to the other one for a rounding error, and of a large model's thousands of choices one
#: can be that close; a mistake in attention shows in every text.
_CHECK_SEEDS: Final = (1, 2, 3)


def check_architecture(model: PreTrainedModel) -> None:
    """Refuse what is known not to work.

    Raises:
        UnsupportedModelError: With the first reason found.
    """
    for reason in (*_faults_of_class(model), *_faults_of_config(model)):
        raise UnsupportedModelError(f"{type(model).__name__} {reason}.")


def _faults_of_class(model: PreTrainedModel) -> Iterator[str]:
    if model.config.is_encoder_decoder:
        yield "is an encoder-decoder; only decoders are served"
    if not model._supports_attention_backend:  # noqa: SLF001 - transformers' own flag for this
        yield (
            "does not use transformers' attention interface, so its attention cannot be "
            "replaced by the engine's"
        )
    if getattr(model, "_is_stateful", False):
        yield "keeps state other than keys and values"


def _faults_of_config(model: PreTrainedModel) -> Iterator[str]:
    config: Any = model.config.get_text_config(decoder=True)
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if strange:
        yield (
            f"has layers of type {', '.join(strange)}; only full and sliding attention are computed"
        )
    for flag in _BIDIRECTIONAL_FLAGS:
        if getattr(config, flag, False):
            yield f"attends in both directions ({flag})"
    if getattr(config, "is_causal", True) is False:
        yield "attends in both directions (is_causal is false)"
    if not _has_one_shape(model.config):
        yield "does not have keys and values of one size in all layers"
    longest = longest_context(model.config)
    if longest is not None and longest < _CHECK_TOKENS:
        yield f"has a context of less than {_CHECK_TOKENS} tokens"


def _has_one_shape(config: PretrainedConfig) -> bool:
    try:
        KvShape.of(config)
    except (AttributeError, TypeError, RuntimeError):
        # The last one is transformers' own, for a setting that its layers differ in.
        return False
    return True


def longest_context(config: PretrainedConfig) -> int | None:
    """How many positions, prompt and output together, a model computes as transformers does.

    That is as many as it was made for, with one exception. A longrope model has two sets of
    rotary frequencies and takes the second one for texts longer than its original context; keys
    that are there already do not fit it, so transformers computes a text that grows past that
    length anew. The step's tokens share one set here: beyond the original context a request's
    result would depend on its neighbours. Dynamic rotary frequencies change only beyond
    ``max_position_embeddings``, where no text gets.

    Returns:
        ``None`` where the configuration does not say.
    """
    text: Any = config.get_text_config(decoder=True)
    stated: object = getattr(text, "max_position_embeddings", None)
    if not isinstance(stated, int):
        return None
    longest: int = stated
    ropes: Any = getattr(text, "rope_parameters", None) or {}
    # One set of parameters for all layers, or one for each type of layer.
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, Mapping) and rope.get("rope_type") == "longrope":
            longest = min(longest, rope.get("original_max_position_embeddings", longest))
    return longest


def check_logits(model: PreTrainedModel) -> None:
    """Compare our attention with the model's own, and warm the model up; a dozen small forwards.

    Whether the attention is the same is decided in float32, whatever the model is in: half
    precision errs by so much in a trained model (18 % of the logits' deviation, measured on
    SmolLM2 in bfloat16) that a mistake could hide in it. So does one that rounds activations to
    few bits: its quantized layers make room for others that do not. A model of either kind then
    runs as it is too, where it must come close.

    The model's attention implementation must be switchable; it is ours afterwards.

    Raises:
        UnsupportedModelError: The logits differ, not every layer attends through us, or the
            model cannot be run at all.
    """
    name = type(model).__name__
    error = rough = float("nan")
    try:
        # Not inference_mode: parameters are put aside and back in between.
        with torch.no_grad(), _short_window(model):
            for seed in _CHECK_SEEDS:
                with _lifted(model), _without_quantized_layers(model):
                    error = float(_errors(model, torch.float32, seed).max())
                rough = 0.0
                if model.dtype != torch.float32 or _is_quantized(model):
                    rough = float(_errors(model, model.dtype, seed).median())
                # Not "error > tolerance": that would let NaN pass.
                if error <= _TOLERANCE and rough <= _ROUGH_TOLERANCE:
                    return
    except (RuntimeError, ValueError, TypeError, KeyError) as fault:
        raise UnsupportedModelError(
            f"{name} cannot be run under the engine's attention ({type(fault).__name__})."
        ) from fault
    raise UnsupportedModelError(
        f"{name} computes other logits under the engine's attention than under its own "
        f"(relative error {error:.1e} in float32, {rough:.1e} in {model.dtype})."
    )


def _errors(model: PreTrainedModel, dtype: torch.dtype, seed: int) -> Tensor:
    """The relative error of every position of both sequences."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    # A generator of its own: loading a model must not disturb anybody's random numbers.
    dice = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (2, _CHECK_TOKENS), generator=dice).to(model.device)
    lengths = (sum(_CHECK_CHUNKS), sum(_STRANGER_CHUNKS))
    model.set_attn_implementation(NAME)
    ours = torch.cat(_paged_logits(model, ids.tolist(), dtype)).double()
    model.set_attn_implementation("eager")
    try:
        rows = [row[None, :length] for row, length in zip(ids, lengths, strict=True)]
        own = torch.cat([_own_logits(model, row) for row in rows]).double()
    finally:
        model.set_attn_implementation(NAME)
    return _relative(ours, own)


@contextlib.contextmanager
def little_changes_in(model: PreTrainedModel) -> Iterator[None]:
    """Compare the logits before and after the weights of a model are rounded, inside.

    Raises:
        UnsupportedModelError: They differ by more than rounding explains.
    """
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    dice = torch.Generator().manual_seed(_CHECK_SEEDS[0])
    ids = torch.randint(0, vocabulary, (2, _CHECK_TOKENS), generator=dice).tolist()
    with torch.no_grad():
        before = torch.cat(_paged_logits(model, ids, model.dtype)).double()
        yield
        after = torch.cat(_paged_logits(model, ids, model.dtype)).double()
    error = float(_relative(after, before).median())
    # Not ">", which would let NaN pass.
    if not error <= _ROUGH_TOLERANCE:
        raise UnsupportedModelError(
            f"{type(model).__name__} computes other logits with rounded weights than without "
            f"(relative error {error:.1e})."
        )


def _relative(got: Tensor, own: Tensor) -> Tensor:
    """Per position: |got - own| / |own - mean(own)|, as L2 norms."""
    error: Tensor = (got - own).norm(dim=-1) / (own - own.mean(-1, keepdim=True)).norm(dim=-1)
    return error


def _own_logits(model: PreTrainedModel, row: Tensor) -> Tensor:
    """All logits of one sequence as transformers' ``generate`` gets them: with its own cache.

    Not in one forward without a cache: where the two differ (a cache that forgets what the
    layers' windows still see), it is ``generate`` that users know.
    """
    untyped: Any = model
    prompt = untyped(input_ids=row[:, :-_CHECK_CACHED], use_cache=True)
    rest = untyped(input_ids=row[:, -_CHECK_CACHED:], cache=prompt.cache, use_cache=True)
    logits: Tensor = torch.cat([prompt.logits[0], rest.logits[0]])
    return logits


@contextlib.contextmanager
def _lifted(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute in float32: each module's parameters are, while its forward runs.

    So there is never a second copy of the model, only of one module.
    """
    at_rest: dict[torch.nn.Parameter, Tensor] = {}

    def lift(module: torch.nn.Module, _args: object) -> None:
        for parameter in module.parameters(recurse=False):
            # Numbers of 8 bits mean nothing without their scale.
            if parameter.dtype in {torch.float16, torch.bfloat16}:
                at_rest[parameter] = parameter.data
                parameter.data = parameter.data.float()

    def lower(module: torch.nn.Module, _args: object, _output: object) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in at_rest:
                parameter.data = at_rest.pop(parameter)

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(lift).remove)
            hooks.callback(module.register_forward_hook(lower, always_call=True).remove)
        try:
            yield
        finally:
            for parameter, data in at_rest.items():
                parameter.data = data


def _is_quantized(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "is_quantized", False))


@contextlib.contextmanager
def _without_quantized_layers(model: PreTrainedModel) -> Iterator[None]:
    """Let every quantized linear layer multiply with a random float32 matrix instead.

    Layers of one shape share one matrix: what is checked is attention, and any weights do.
    """
    dice = torch.Generator().manual_seed(0)
    matrices: dict[Any, Tensor] = {}
    with contextlib.ExitStack() as back:
        for module in model.modules() if _is_quantized(model) else ():
            untyped: Any = module
            sizes = getattr(untyped, "out_features", None), getattr(untyped, "in_features", None)
            if None in sizes or _is_plain_linear(module):
                continue
            shape: Any = sizes
            if shape not in matrices:
                matrix = torch.randn(shape, generator=dice) / untyped.in_features**0.5
                matrices[shape] = matrix.to(model.device)
            instance = vars(module)
            if "forward" in instance:
                back.callback(instance.__setitem__, "forward", instance["forward"])
            else:
                back.callback(instance.pop, "forward")
            instance["forward"] = functools.partial(linear, weight=matrices[shape])
        yield


def _is_plain_linear(module: torch.nn.Module) -> bool:
    # Quantization comes as a class, as a kind of tensor, or wrapped around the forward.
    if isinstance(module, PackedLinear):
        return True
    plain = type(module) is torch.nn.Linear and type(module.weight) is torch.nn.Parameter
    return plain and "forward" not in vars(module)


def _paged_logits(model: PreTrainedModel, ids: list[list[int]], dtype: torch.dtype) -> list[Tensor]:
    """All logits of both sequences, computed together in steps: ``[tokens, vocabulary]`` each."""
    shape = KvShape.of(model.config)
    # On a GPU in half precision as it will be served: with the kernel that wants large pages.
    half = model.device.type == "cuda" and dtype != torch.float32
    size = CUDA_PAGE if half else _CHECK_PAGE
    pages = -(-_CHECK_TOKENS // size)
    pool = KvPool(
        shape,
        num_blocks=2 * pages,
        block_size=size,
        dtype=dtype,
        device=model.device,
    )
    # Each sequence has every other page, the last one first.
    tables = [tuple(range(2 * pages - 1 - i, -1, -2)) for i in range(2)]
    starts = [0, 0]
    logits: list[list[Tensor]] = [[], []]
    for lengths in zip(_CHECK_CHUNKS, _STRANGER_CHUNKS, strict=True):
        chunks = [
            _chunk(i, ids[i][starts[i] : starts[i] + lengths[i]], starts[i], tables[i])
            for i in range(2)
        ]
        step = step_kind(pool)(chunks, pool)
        total = sum(lengths)
        # Backwards, so that a model that misreads the index shows it.
        keep = torch.arange(total - 1, -1, -1, device=model.device)
        rows = compute_logits(model, step, keep).flip(0)
        if len(step.layers) != shape.num_layers:
            raise UnsupportedModelError(
                f"Only {len(step.layers)} of {shape.num_layers} layers of {type(model).__name__} "
                "attend through the attention interface."
            )
        for i, last in enumerate(step.last_tokens):
            logits[i].append(rows[last - lengths[i] + 1 : last + 1])
            starts[i] += lengths[i]
    return [torch.cat(parts) for parts in logits]


def _chunk(row: int, token_ids: list[int], start: int, blocks: tuple[int, ...]) -> Chunk:
    return Chunk(
        request_id=RequestId(f"check-{row}"),
        row=row,
        token_ids=tuple(token_ids),
        start=start,
        blocks=blocks,
        samples=True,
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        output_index=0,
    )


@contextlib.contextmanager
def _short_window(model: PreTrainedModel) -> Iterator[None]:
    """Shorten the model's sliding windows, so that a short prompt is longer than they are.

    Configuration and modules both: the masks read one, the layers the other. A model that keeps
    its window anywhere else then fails the check, which is the safe way to be wrong. A window
    that no text is longer than stays: some models have one that their layers do not know of.
    """
    longest = longest_context(model.config) or math.inf
    holders: list[Any] = [model.config, model.config.get_text_config(decoder=True)]
    holders += model.modules()
    changed: list[tuple[Any, int]] = []
    try:
        for holder in holders:
            window = getattr(holder, "sliding_window", None)
            if isinstance(window, int) and _CHECK_WINDOW < window < longest:
                changed.append((holder, window))
                holder.sliding_window = _CHECK_WINDOW
        yield
    finally:
        for holder, window in changed:
            holder.sliding_window = window
