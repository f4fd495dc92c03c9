"""Runs the steps that the scheduler plans: one forward, one token per sampling chunk."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from triolet.engine.architecture import check_architecture, check_logits
from triolet.engine.forward import compute_logits
from triolet.engine.graphs import DecodeGraphs
from triolet.engine.kv import KvPool, KvShape
from triolet.engine.logprobs import DEFAULT_MAX_LOGPROBS
from triolet.engine.plan import StepSamples
from triolet.engine.prompt_scores import PromptScores
from triolet.engine.sampler import Sampler
from triolet.engine.transfer import Flag, to_device, to_host
from triolet.engine.varlen import step_kind, why_gathered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from triolet.core import RequestId
    from triolet.engine.attention import Step
    from triolet.engine.graphs import Capture
    from triolet.engine.plan import Chunk, StepPlan


class TorchRunner:
    """A transformers model, its KV pool and its sampler. Lives in the engine's thread.

    Made by :func:`build_runner`, which checks that the model can be run at all.

    Args:
        model: In evaluation mode, its attention implementation set to ours.
        num_blocks: Blocks of the KV pool, numbered from 0.
        block_size: Tokens per block.
        max_num_seqs: Rows of the batch.
        eos_token_ids: The model's end-of-sequence ids, for ``min_tokens``.
        max_logprobs: Most likely ids reported per token at most.
        capture: Makes what records decode steps, to play them again, anew for each pool; ``None``
            runs every step as it comes.
        max_model_len: Tokens that a sequence has at most, for the recordings; ``None``: the pool's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        eos_token_ids: frozenset[int] = frozenset(),
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        capture: Callable[[], Capture] | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self._model = model
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._capture = capture
        self._max_model_len = max_model_len
        self._vocabulary: int = model.config.get_text_config(decoder=True).vocab_size
        self._max_logprobs = max_logprobs
        self._sampler = Sampler(
            max_rows=max_num_seqs,
            device=model.device,
            eos_token_ids=eos_token_ids,
            max_logprobs=max_logprobs,
        )
        self._new_pool()

    def run(self, plan: StepPlan) -> StepSamples:
        """Compute all chunks of a step, sample, and score prompts.

        Keys and values of every chunk are in the pool afterwards. There is one synchronisation
        with the device, at the end; more only where a row's nucleus needs a sort, for prompts that
        are scored, and to tell whose numbers are not finite once some are not.

        Raises:
            EngineError: A block table does not cover its chunk. As after any other exception, the
                pool's contents are not to be used again: call :meth:`reset`.
        """
        with torch.inference_mode():
            if plan.copies:
                self._pool.copy(plan.copies)
            if not plan.chunks:
                return StepSamples(samples=())
            played = self._graphs.run(plan.chunks) if self._graphs is not None else None
            if played is not None:
                return StepSamples(tuple(self._sampler.sample(played, plan.chunks)))
            return self._compute(plan.chunks)

    def _compute(self, chunks: tuple[Chunk, ...]) -> StepSamples:
        """A step kernel by kernel."""
        step = self._kind(chunks, self._pool)
        prompts = None
        if any(chunk.scores_prompt for chunk in chunks):
            prompts = PromptScores(
                chunks, step.last_tokens, vocabulary=self._vocabulary, max_top=self._max_logprobs
            )
            logits = self._score_prompts(step, chunks, prompts)
        else:
            logits = compute_logits(self._model, step, step.sampled)
        spoiled = self._spoiled(step, chunks)
        samples = self._sampler.sample(logits, [c for c in chunks if c.samples], spoiled)
        unsound = set() if prompts is None else prompts.unsound
        if spoiled is not None and spoiled.read():
            unsound |= self._who_is_spoiled(step, chunks)
        scores = {} if prompts is None else prompts.result()
        return StepSamples(tuple(samples), scores, frozenset(unsound))

    def _spoiled(self, step: Step, chunks: Sequence[Chunk]) -> Flag | None:
        """Whether any keys or values are not finite of those that no sample speaks for.

        A chunk's last token attends to itself, so that a token sampled from finite logits speaks
        for that one; not for those before it, in a model with windows. Steps that only decode have
        no others.
        """
        spoken_for = sum(len(chunk.token_ids) == 1 and chunk.samples for chunk in chunks)
        if spoken_for == len(chunks):
            return None
        # A step has them first.
        return Flag(self._pool.finite(step.slots[spoken_for:]).logical_not())

    def _who_is_spoiled(self, step: Step, chunks: Sequence[Chunk]) -> set[RequestId]:
        finite = [
            self._pool.finite(step.slots[last + 1 - len(chunk.token_ids) : last + 1])
            for chunk, last in zip(chunks, step.last_tokens, strict=True)
        ]
        fine = to_host(torch.stack(finite))
        return {chunk.request_id for chunk, good in zip(chunks, fine, strict=True) if not good}

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def how_it_attends(self) -> str:
        """For the log: how pages are read, and why."""
        reason = why_gathered(self._pool)
        if reason is None:
            return "attention reads its pages in place"
        return f"attention gathers its pages, since {reason}"

    def warm_up(self) -> None:
        """Record the decode steps that can be, so that no request waits for it."""
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.warm_up()

    def resize(self, num_blocks: int) -> None:
        """As :meth:`reset`, with another number of blocks."""
        self._num_blocks = num_blocks
        self.reset()

    def _logits(self, step: Step, positions: list[int]) -> Tensor:
        keep = to_device(positions, self._model.device)
        return compute_logits(self._model, step, keep)

    def _score_prompts(self, step: Step, chunks: Sequence[Chunk], prompts: PromptScores) -> Tensor:
        """Compute a step that scores prompts: return the logits to sample from, score others."""
        last = step.last_tokens
        rows = [last[i] for i, chunk in enumerate(chunks) if chunk.samples]
        first, *others = prompts.pieces or ([],)
        with _decoding_once(self._model) if others else contextlib.nullcontext():
            logits = self._logits(step, rows + first)
            if first:
                prompts.score(logits[len(rows) :])
            for piece in others:
                prompts.score(self._logits(step, piece))
        return logits[: len(rows)]

    def reset(self) -> None:
        """Drop the KV pool and build a new one. Nothing computed before may be referred to."""
        # The old one goes first: there may be no room for two.
        del self._pool, self._graphs
        if self._model.device.type == "cuda":
            # What a failed step left on its way must not write to the new pool.
            torch.cuda.synchronize(self._model.device)
        self._sampler.reset()
        self._new_pool()

    def _new_pool(self) -> None:
        self._pool = KvPool(
            KvShape.of(self._model.config),
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            dtype=self._model.dtype,
            device=self._model.device,
            spare=0 if self._capture is None else 1,
        )
        self._kind = step_kind(self._pool)
        self._graphs: DecodeGraphs | None = None
        if self._capture is not None:
            self._graphs = DecodeGraphs(
                functools.partial(compute_logits, self._model),
                self._pool,
                capture=self._capture(),
                max_rows=self._max_num_seqs,
                max_pages=self._max_pages,
            )

    @property
    def _max_pages(self) -> int:
        """Pages that one sequence can have."""
        if self._max_model_len is None:
            return self._num_blocks
        return min(self._num_blocks, -(-self._max_model_len // self._block_size))


@contextlib.contextmanager
def _decoding_once(model: PreTrainedModel) -> Iterator[None]:
    """Let the layers below the model's head compute on the first forward alone.

    The following ones get the same hidden states again, so that each costs the head and what the
    model does to its logits. A model without such a part computes the step again, which writes
    the same keys and values in the same places: right too, only slower.
    """
    untyped: Any = model
    decoder = untyped.get_decoder()
    if decoder is model:
        yield
        return
    compute = decoder.forward
    instance = vars(decoder)
    own = instance.get("forward")
    outputs: list[Any] = []

    def once(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - untyped models
        if not outputs:
            outputs.append(compute(*args, **kwargs))
        return outputs[0]

    decoder.forward = once
    try:
        yield
    finally:
        del decoder.forward
        if own is not None:
            decoder.forward = own


def quieten(model: PreTrainedModel) -> None:
    """Keep a model from looking for padding in its ids: we send none, and to look is to wait."""
    name = "warn_if_padding_and_no_attention_mask"
    for module in model.modules():
        if hasattr(module, name):
            setattr(module, name, lambda *_ids: None)


def build_runner(  # noqa: PLR0913 - all but the model by name
    model: PreTrainedModel,
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    eos_token_ids: frozenset[int] = frozenset(),
    max_logprobs: int = DEFAULT_MAX_LOGPROBS,
    checked: bool = False,
    capture: Callable[[], Capture] | None = None,
    max_model_len: int | None = None,
) -> TorchRunner:
    """Check a loaded model, warm it up and make its runner. The model is the runner's from now on.

    Args:
        model: A causal language model, all of it on one device and in one dtype.
        num_blocks: See :class:`TorchRunner`; :func:`~triolet.engine.kv.bytes_per_block` says
            what a block costs.
        block_size: :func:`~triolet.engine.varlen.page_size` says what suits a device.
        max_num_seqs: Rows of the batch.
        eos_token_ids: The model's end-of-sequence ids, for ``min_tokens``.
        max_logprobs: Most likely ids reported per token at most.
        checked: Whether its logits have been compared before its weights were rounded.
        capture: See :class:`TorchRunner`.
        max_model_len: See :class:`TorchRunner`.

    Raises:
        UnsupportedModelError: The engine would not compute this model as transformers does.
    """
    check_architecture(model)
    untyped: Any = model  # transformers decorates eval() out of its types
    untyped.eval()
    quieten(model)
    if not checked:
        check_logits(model)
    return TorchRunner(
        model,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        eos_token_ids=eos_token_ids,
        max_logprobs=max_logprobs,
        capture=capture,
        max_model_len=max_model_len,
    )
