"""Linear layers with weights of 8 bits, and activations rounded to 8 bits on the way in.

A decode step is as fast as the weights can be read, so that a quarter of the bytes is most of what
can be won. Both sides of a product are cut into blocks of 32 numbers along the layer's input, with
one scale each, as llama.cpp's Q8_0 does. A block's largest number decides its scale: with one
scale for a whole tensor, as torch's dynamic quantization has it, the few huge activations of a
trained model leave no bits to the others, and a neighbour's token changes yours. Here a row's
result depends on that row alone, bit for bit. Blocks of activations that hold such a huge number
are rounded twice, the second time what the first left: one block in eight, and most of what
rounding activations would cost in quality.

The product is a C++ kernel of ours (``kernels/int8_linear.cpp``, which opens with its rules),
compiled where it runs. Where that fails, layers are float32 with the same rounded weights: the same
quality, without the speed.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import attrs
import torch
from torch import Tensor, nn

from triolet.engine.linear import pack_linear_layers
from triolet.engine.memory import trim
from triolet.engine.native import NoLibraryError, load_library
from triolet.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

#: Numbers with one scale.
BLOCK: Final = 32
#: Largest magnitude of an integer.
LARGEST: Final = 127
#: A block whose largest number is smaller counts as zeros: the inverse of its scale might be none.
SMALLEST: Final = 1e-30
#: A block of activations whose integers' magnitudes sum up to less is rounded twice: one number
#: towers over the others (their mean is below an eighth of it) and left them few bits.
PEAKED: Final = LARGEST * BLOCK // 8
#: Steps of the second rounding in one of the first; half a step is 127 of them.
FINER: Final = 2 * LARGEST
#: A layer with fewer outputs costs nothing, and often decides something: a gate.
FEWEST_OUTPUTS: Final = 16

# What the kernel wants of its arguments; it says there why.
_LANES: Final = 16
_ZERO: Final = 128
_BYTES_PER_BLOCK: Final = 80
#: Outputs packed at a time, so that a large vocabulary needs no second copy of its weight.
_ROWS_AT_A_TIME: Final = 4096


@attrs.frozen(eq=False)
class Blocks:
    """Numbers in blocks; all in float32."""

    #: ``[..., n / 32, 32]``: the values divided by their block's scale.
    steps: Tensor
    #: The same shape: whole numbers from -127 to 127.
    integers: Tensor
    #: ``[..., n / 32, 1]``.
    scales: Tensor


def round_to_blocks(values: Tensor) -> Blocks:
    """Cut the last dimension into blocks, and round each to a scale and integers.

    Args:
        values: float32, ``[..., n]``, n a multiple of 32.

    The scale of a block that is not finite is NaN, and its integers are 0.
    """
    blocks = values.reshape(*values.shape[:-1], -1, BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    finite = largest.isfinite()
    used = finite & (largest >= SMALLEST)
    inverse = torch.where(used, LARGEST / largest, 0.0)
    # Zeros where nothing is used: 0 * inf is no integer.
    steps = torch.where(used, blocks, 0.0) * inverse
    scales = torch.where(used, largest / LARGEST, 0.0)
    return Blocks(steps, steps.round(), torch.where(finite, scales, float("nan")))


def rounded(values: Tensor) -> Tensor:
    """The values that stand for a weight's, in float32."""
    blocks = round_to_blocks(values)
    return (blocks.integers * blocks.scales).flatten(-2)


def rounded_twice(values: Tensor) -> Tensor:
    """The values that stand for activations, in float64, where they are exact."""
    blocks = round_to_blocks(values)
    finer = ((blocks.steps - blocks.integers) * FINER).round()
    peaked = blocks.integers.abs().sum(-1, keepdim=True) < PEAKED
    scales = torch.where(peaked, blocks.scales / FINER, 0.0).double()
    return (blocks.integers.double() * blocks.scales + finer * scales).flatten(-2)


@attrs.frozen(eq=False)
class Int8Weight:
    """A weight ``[outputs, inputs]`` as the kernel reads it: sixteen outputs side by side."""

    outputs: int
    inputs: int
    #: int32 ``[groups, inputs / 32, 8, 16]``, each of four bytes that are 128 more than integers.
    integers: Tensor = attrs.field(repr=False)
    #: float32 ``[groups, inputs / 32, 16]``.
    scales: Tensor = attrs.field(repr=False)

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """Round and pack a float32 weight, whose inputs are a multiple of 32."""
        outputs, inputs = weight.shape
        groups, blocks = -(-outputs // _LANES), inputs // BLOCK
        integers = torch.empty(groups, blocks, BLOCK // 4, _LANES, dtype=torch.int32)
        scales = torch.empty(groups, blocks, _LANES)
        for start in range(0, outputs, _ROWS_AT_A_TIME):
            rows = weight[start : start + _ROWS_AT_A_TIME]
            padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % _LANES))
            part = round_to_blocks(padded)
            here = slice(start // _LANES, start // _LANES + len(padded) // _LANES)
            # In two's complement the first bit is all that 128 more changes.
            quads = (part.integers.to(torch.int8).view(torch.uint8) ^ _ZERO).view(torch.int32)
            integers[here] = quads.view(-1, _LANES, blocks, BLOCK // 4).permute(0, 2, 3, 1)
            scales[here] = part.scales.view(-1, _LANES, blocks).transpose(1, 2)
        return cls(outputs, inputs, integers, scales)


class Int8Kernel:
    """The product in C++. Made by :func:`load_kernel`, which has seen that it computes right."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._multiply = library.triolet_int8_linear
        self._multiply.restype = None
        self._multiply.argtypes = [
            pointer, size, size, size, pointer, pointer, pointer, pointer, pointer, ctypes.c_int32,
        ]  # fmt: skip

    def multiply(self, inputs: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
        """``inputs @ weight.T + bias``: float32 ``[..., inputs]`` to ``[..., outputs]``."""
        *shape, width = inputs.shape
        if width != weight.inputs:
            # The kernel would read what is not there.
            raise ValueError(f"{width} inputs for a layer of {weight.inputs}.")
        if inputs.dtype != torch.float32 or not inputs.is_contiguous():
            inputs = inputs.to(torch.float32).contiguous()
        rows, blocks = inputs.numel() // width, width // BLOCK
        output = torch.empty(*shape, weight.outputs)
        scratch = torch.empty(rows * blocks * _BYTES_PER_BLOCK, dtype=torch.uint8)
        self._multiply(
            inputs.data_ptr(),
            rows,
            blocks,
            weight.outputs,
            weight.integers.data_ptr(),
            weight.scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            output.data_ptr(),
            scratch.data_ptr(),
            torch.get_num_threads(),
        )
        return output


def load_kernel(progress: Callable[[str], None]) -> Int8Kernel:
    """The kernel, compiled if it must be, and compared with torch.

    Raises:
        NoLibraryError: It cannot be had here, or computes something else.
    """
    kernel = Int8Kernel(load_library("int8_linear", progress=progress))
    # A generator of its own: loading must not disturb anybody's random numbers.
    dice = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(33, 3 * BLOCK, generator=dice), torch.randn(33, generator=dice)
    inputs = torch.randn(15, 3 * BLOCK, generator=dice)
    got = kernel.multiply(inputs, Int8Weight.of(weight), bias)
    own = rounded_twice(inputs) @ rounded(weight).double().T + bias
    if not torch.allclose(got, own.float(), atol=1e-4):
        raise NoLibraryError("what the C++ compiler built computes something else than torch")
    return kernel


class Int8Linear(nn.Module):
    """A linear layer on the kernel.

    Args:
        linear: The layer to take the place of. Its weight is not kept.
        kernel: Multiplies.
    """

    bias: Tensor | None

    def __init__(self, linear: nn.Linear, kernel: Int8Kernel) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._kernel = kernel
        self._packed = Int8Weight.of(linear.weight.detach())
        # Some models ask for its dtype; one that computes with it gets NaN, and is refused.
        self.weight = linear.weight.detach().new_full((), float("nan")).expand(linear.weight.shape)
        bias: Tensor | None = linear.bias  # torch's annotation forgets the None
        self.register_buffer("bias", bias if bias is None else bias.detach())

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply: ``[..., in_features]`` to float32 ``[..., out_features]``."""
        return self._kernel.multiply(inputs, self._packed, self.bias)


def quantize_linear_layers(model: nn.Module, *, progress: Callable[[str], None]) -> int:
    """Replace the plain linear layers of a float32 model on the CPU by layers of 8 bits.

    Layers whose input is no multiple of 32 and those with fewer than 16 outputs stay float32, and
    so do embeddings, also where one shares its weight with the output layer: that gets its own.

    Returns:
        How many layers were replaced.
    """
    try:
        kernel = load_kernel(progress)
    except NoLibraryError as reason:
        progress(
            f"int8 runs in float32, with the same rounded weights and no gain in speed or memory: "
            f"{reason}"
        )
        return _round_layers(model, _rounded_linear, then=pack_linear_layers)
    return _round_layers(model, lambda linear: Int8Linear(linear, kernel))


def _round_layers(
    model: nn.Module,
    layer: Callable[[nn.Linear], nn.Module],
    then: Callable[[nn.Module], object] = lambda _: trim(),
) -> int:
    replaced = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            # Not isinstance: a subclass may compute something else.
            if type(child) is nn.Linear and _fits(child):
                setattr(module, name, layer(child))
                replaced += 1
    then(model)
    return replaced


def _rounded_linear(linear: nn.Linear) -> nn.Linear:
    with torch.device("meta"):
        copy = nn.Linear(linear.in_features, linear.out_features, bias=False)
    copy.weight = nn.Parameter(rounded(linear.weight.detach()), requires_grad=False)
    copy.bias = linear.bias
    return copy


def _fits(linear: nn.Linear) -> bool:
    weight = linear.weight
    plain = type(weight) is nn.Parameter and weight.device.type == "cpu"
    return (
        plain
        and weight.dtype == torch.float32
        and linear.in_features % BLOCK == 0
        and linear.out_features >= FEWEST_OUTPUTS
    )


def check_quantizable(model: PreTrainedModel) -> None:
    """Refuse what int8 is not for.

    Raises:
        ConfigError: The model is not on the CPU, not in float32, quantized already, or has no
            linear layer that could be.
    """
    reason = None
    if model.device.type != "cpu":
        reason = f"is for the CPU, and the model is on {model.device}: add --device cpu"
    elif getattr(model, "is_quantized", False):
        reason = "is for weights that are not quantized yet, and this model's are"
    elif model.dtype != torch.float32:
        reason = "computes in float32 around its 8-bit layers: leave --dtype at auto"
    elif not any(type(part) is nn.Linear and _fits(part) for part in model.modules()):
        reason = (
            "finds no layer in this model that it could quantize: none is a plain linear layer "
            f"with a multiple of {BLOCK} inputs"
        )
    if reason is not None:
        raise ConfigError(f"--quantization int8 {reason}.", param="quantization")
