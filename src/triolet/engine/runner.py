"""Runs the steps that the scheduler plans: one forward, one token per sampling chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from triolet.engine.architecture import check_architecture, check_logits
from triolet.engine.attention import Step, compute_logits
from triolet.engine.kv import KvPool, KvShape
from triolet.engine.sampler import Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from triolet.engine.plan import StepPlan


class TorchRunner:
    """A transformers model, its KV pool and its sampler. Lives in the engine's thread.

    Made by :func:`build_runner`, which checks that the model can be run at all.

    Args:
        model: In evaluation mode, its attention implementation set to ours.
        num_blocks: Blocks of the KV pool, numbered from 0.
        block_size: Tokens per block.
        max_num_seqs: Rows of the batch.
    """

    def __init__(
        self, model: PreTrainedModel, *, num_blocks: int, block_size: int, max_num_seqs: int
    ) -> None:
        self._model = model
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._sampler = Sampler(max_rows=max_num_seqs, device=model.device)
        self._pool = self._new_pool()

    def run(self, plan: StepPlan) -> list[int]:
        """Compute all chunks of a step and sample.

        Keys and values of every chunk are in the pool afterwards. There is one synchronisation
        with the device, at the end; a second one only where a row's nucleus needs a sort.

        Returns:
            One id per chunk that samples, in the order of the chunks.

        Raises:
            NonFiniteLogitsError: A row's logits are not finite. As after any other exception, the
                pool's contents are not to be used again: call :meth:`reset`.
            EngineError: A block table does not cover its chunk.
        """
        if not plan.chunks:
            return []
        with torch.inference_mode():
            step = Step(plan.chunks, self._pool)
            last = step.last_tokens
            rows = [i for i, chunk in enumerate(plan.chunks) if chunk.samples]
            keep = torch.tensor(
                [last[i] for i in rows], dtype=torch.int64, device=self._model.device
            )
            logits = compute_logits(self._model, step, keep)
            return self._sampler.sample(logits, [plan.chunks[i] for i in rows])

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


def build_runner(
    model: PreTrainedModel, *, num_blocks: int, block_size: int, max_num_seqs: int
) -> TorchRunner:
    """Check a loaded model, warm it up and make its runner. The model is the runner's from now on.

    Args:
        model: A causal language model, all of it on one device and in one dtype.
        num_blocks: See :class:`TorchRunner`; :func:`~triolet.engine.kv.bytes_per_block` says
            what a block costs.
        block_size: 16 to 32 on the CPU.
        max_num_seqs: Rows of the batch.

    Raises:
        UnsupportedModelError: The engine would not compute this model as transformers does.
    """
    check_architecture(model)
    untyped: Any = model  # transformers decorates eval() out of its types
    untyped.eval()
    check_logits(model)
    return TorchRunner(
        model, num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs
    )
