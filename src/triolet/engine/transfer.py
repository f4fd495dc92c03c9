"""The way between the host's memory and the model's device; nobody else crosses it.

A copy from ordinary memory to a GPU, or any read of its results, makes the host wait for all that
was queued there. A step that waits once, at its end, keeps the GPU busy meanwhile. So everything
goes there through :func:`move` and comes back through :func:`to_host`, and a test that interprets
whole steps on a pretended GPU counts who waits (``tests/engine/test_syncs.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Bring a tensor of the host to ``device`` without waiting for it. On the CPU, a no-op.

    The host's memory may be let go at once: torch holds on to it until the copy is done.
    """
    if device.type == "cpu":
        return tensor
    # From memory that the system could page out, the copy would wait.
    if torch.cuda.is_available():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_device(
    numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Numbers of the host as a tensor on ``device``, ``[n]``, without waiting for it."""
    return move(torch.tensor(numbers, dtype=dtype), device)


def to_host(tensor: Tensor) -> Any:  # noqa: ANN401 - nested lists, as deep as the tensor
    """The numbers of a tensor, as ``tolist`` gives them. Waits for the device."""
    return tensor.tolist()


@attrs.define(eq=False)
class Flag:
    """A truth that the host learns when it reads other numbers, and does not wait for alone.

    Who reads such numbers takes ``there``, bool ``[]`` on the device, along and fills in ``here``.
    """

    there: Tensor
    here: bool | None = attrs.field(default=None, init=False)

    def read(self) -> bool:
        """The truth. Waits for the device if nobody took it along."""
        if self.here is None:
            self.here = bool(to_host(self.there))
        return self.here
