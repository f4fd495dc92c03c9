"""Runs the steps that the scheduler plans: one forward, one token per sampling chunk."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from triolet.engine.architecture import check_architecture, check_logits
from triolet.engine.attention import Step, compute_logits
from triolet.engine.kv import KvPool, KvShape
from triolet.engine.logprobs import DEFAULT_MAX_LOGPROBS
from triolet.engine.plan import StepSamples
from triolet.engine.prompt_scores import PromptScores
from triolet.engine.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from triolet.core import RequestId
    from triolet.engine.plan import StepPlan


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
    ) -> None:
        self._model = model
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._vocabulary: int = model.config.get_text_config(decoder=True).vocab_size
        self._max_logprobs = max_logprobs
        self._sampler = Sampler(
            max_rows=max_num_seqs,
            device=model.device,
            eos_token_ids=eos_token_ids,
            max_logprobs=max_logprobs,
        )
        self._pool = self._new_pool()

    def run(self, plan: StepPlan) -> StepSamples:
        """Compute all chunks of a step, sample, and score prompts.

        Keys and values of every chunk are in the pool afterwards. There is one synchronisation
        with the device, at the end; more only where a row's nucleus needs a sort, and for
        prompts that are scored.

        Raises:
            EngineError: A block table does not cover its chunk. As after any other exception, the
                pool's contents are not to be used again: call :meth:`reset`.
        """
        if not plan.chunks:
            return StepSamples(samples=())
        with torch.inference_mode():
            if plan.copies:
                self._pool.copy(plan.copies)
            step = Step(plan.chunks, self._pool)
            last = step.last_tokens
            rows = [last[i] for i, chunk in enumerate(plan.chunks) if chunk.samples]
            if any(chunk.scores_prompt for chunk in plan.chunks):
                prompts = PromptScores(
                    plan.chunks, last, vocabulary=self._vocabulary, max_top=self._max_logprobs
                )
                logits = self._score_prompts(step, rows, prompts)
                prompt_logprobs, unsound = prompts.result(), frozenset(prompts.unsound)
            else:
                logits = self._logits(step, rows)
                prompt_logprobs, unsound = {}, frozenset()
            prompts_are_fine = self._all_finite(step, plan)
            samples = self._sampler.sample(
                logits, [chunk for chunk in plan.chunks if chunk.samples]
            )
            if not prompts_are_fine:
                unsound |= self._not_finite(step, plan)
        return StepSamples(tuple(samples), prompt_logprobs, unsound)

    def _finite(self, step: Step, tokens: Sequence[int]) -> Tensor:
        return self._pool.finite(step.slots[torch.tensor(tokens, device=self._model.device)])

    def _all_finite(self, step: Step, plan: StepPlan) -> Tensor | bool:
        """Whether the keys and values are that no sample speaks for.

        A chunk's last token attends to itself, so that a token sampled from finite logits speaks
        for that one; not for those before it, in a model with windows.
        """
        last = step.last_tokens
        tokens = [
            token
            for i, chunk in enumerate(plan.chunks)
            if len(chunk.token_ids) > 1 or not chunk.samples
            for token in range(last[i] + 1 - len(chunk.token_ids), last[i] + 1)
        ]
        return self._finite(step, tokens) if tokens else True

    def _not_finite(self, step: Step, plan: StepPlan) -> set[RequestId]:
        return {
            chunk.request_id
            for chunk, last in zip(plan.chunks, step.last_tokens, strict=True)
            if not self._finite(step, range(last + 1 - len(chunk.token_ids), last + 1))
        }

    def _logits(self, step: Step, positions: list[int]) -> Tensor:
        keep = torch.tensor(positions, dtype=torch.int64, device=self._model.device)
        return compute_logits(self._model, step, keep)

    def _score_prompts(self, step: Step, rows: list[int], prompts: PromptScores) -> Tensor:
        """Compute a step that scores prompts: return the logits of ``rows``, score the others."""
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
        del self._pool
        self._sampler.reset()
        self._pool = self._new_pool()

    def _new_pool(self) -> KvPool:
        return KvPool(
            KvShape.of(self._model.config),
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            dtype=self._model.dtype,
            device=self._model.device,
        )


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


def build_runner(
    model: PreTrainedModel,
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    eos_token_ids: frozenset[int] = frozenset(),
    max_logprobs: int = DEFAULT_MAX_LOGPROBS,
    checked: bool = False,
) -> TorchRunner:
    """Check a loaded model, warm it up and make its runner. The model is the runner's from now on.

    Args:
        model: A causal language model, all of it on one device and in one dtype.
        num_blocks: See :class:`TorchRunner`; :func:`~triolet.engine.kv.bytes_per_block` says
            what a block costs.
        block_size: 16 to 32 on the CPU.
        max_num_seqs: Rows of the batch.
        eos_token_ids: The model's end-of-sequence ids, for ``min_tokens``.
        max_logprobs: Most likely ids reported per token at most.
        checked: Whether its logits have been compared before its weights were rounded.

    Raises:
        UnsupportedModelError: The engine would not compute this model as transformers does.
    """
    check_architecture(model)
    untyped: Any = model  # transformers decorates eval() out of its types
    untyped.eval()
    if not checked:
        check_logits(model)
    return TorchRunner(
        model,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        eos_token_ids=eos_token_ids,
        max_logprobs=max_logprobs,
    )
