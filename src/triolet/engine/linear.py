"""Linear layers whose weights lie in memory as the CPU's matrix kernel wants them.

A decode step multiplies a few rows with every weight of the model. Torch's default (MKL) packs
the weight anew in each call; oneDNN takes it packed once, at load. On two AVX2 cores, 8 rows
and SmolLM2's shapes that makes the layers 1.4 times and the output layer 2.3 times as fast; the
results differ by the rounding of another summation order (1e-4 on logits of 20).

The operators are those that ``torch.compile`` emits for the same purpose. They have no public
name, so where a torch has them not, the layers stay as they are.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from triolet.engine.memory import trim

#: Bytes of replaced weights after which their memory is given back, so that a model is never in
#: memory twice.
TRIM_BYTES: Final = 2**27


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` in float32 on the CPU, with the weight packed.

    Args:
        linear: The layer to take the place of. Its weight is copied, and may be dropped after.
    """

    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        # Not a parameter: a packed tensor has a layout that nothing but the kernel can read.
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(  # noqa: SLF001 - see module
            linear.weight.detach(), None
        )
        # The overload itself: a call of the packet looks for it anew.
        self._multiply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001 - see module
        # Some models ask for its dtype. One that computes with it gets NaN, which the check of
        # the logits at load refuses.
        self.weight = linear.weight.detach().new_full((), float("nan")).expand(linear.weight.shape)
        bias: Tensor | None = linear.bias  # torch's annotation forgets the None
        self.register_buffer("bias", bias if bias is None else bias.detach())

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply: ``[..., in_features]`` to ``[..., out_features]``."""
        # Not through the attribute, which a module looks up the long way round.
        bias = self._buffers["bias"]
        output: Tensor = self._multiply(inputs, self._packed, bias, "none", [], "")
        return output


def pack_linear_layers(model: nn.Module) -> int:
    """Replace every plain linear layer of a float32 model on the CPU by a packed one.

    Layers of other classes, dtypes or devices are left alone, and all are where torch lacks the
    operators. An output layer that shares its weight with the embedding gets a packed copy.

    Returns:
        How many layers were replaced.
    """
    operators = torch.ops.mkldnn
    untyped: Any = torch.backends.mkldnn
    if not untyped.is_available() or not hasattr(operators, "_linear_pointwise"):
        return 0
    # Not isinstance: a subclass may compute something else. Names, for whoever holds the layers
    # themselves holds their weights too.
    places = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear and _fits(child.weight)
    ]
    freed = 0
    for module, name in places:
        packed = PackedLinear(getattr(module, name))
        setattr(module, name, packed)
        freed += packed.weight.numel() * packed.weight.itemsize
        if freed >= TRIM_BYTES:
            trim()
            freed = 0
    return len(places)


def _fits(weight: Tensor) -> bool:
    # Quantized weights are often a subclass of tensors that says it is in float32.
    plain = type(weight) is nn.Parameter
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32
