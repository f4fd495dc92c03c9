"""One forward of a model over a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from triolet.engine.attention import Step


def compute_logits(model: Any, step: Step, keep: Tensor) -> Tensor:  # noqa: ANN401 - untyped models
    """Run the model over a step.

    Args:
        model: A transformers causal language model whose attention implementation is ours.
        step: What to compute; its keys and values are written.
        keep: int64 ``[R]``, the indices in the flattened row to compute logits for, in any order.

    Returns:
        ``[R, vocabulary]`` in the model's dtype, final soft-capping and scaling included.
    """
    if step.cleared.numel():
        step.pool.clear(step.cleared)
    output = model(
        input_ids=step.input_ids,
        position_ids=step.position_ids,
        use_cache=False,
        logits_to_keep=keep,
        triolet_step=step,
    )
    logits: Tensor = output.logits[0]
    return logits
