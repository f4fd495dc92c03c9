"""What the tokens of a step read: made once per step and window, used in every layer."""

from __future__ import annotations

from typing import TypeAlias

import attrs
from torch import Tensor


@attrs.frozen(eq=False)
class DecodeView:
    """What decode rows of about one length read under one window."""

    #: Which rows of the flattened row.
    rows: slice
    #: int64 ``[rows * pages]``, each row padded with its own last page.
    pages: Tensor
    #: How many positions of the gathered pages are read.
    width: int
    #: Additive, ``[rows, 1, 1, width]``; ``None`` where every row sees all of ``width``.
    mask: Tensor | None


@attrs.frozen(eq=False)
class PrefillView:
    """What one prefill chunk of a step reads under one window."""

    #: Its tokens are ``begin:end`` of the flattened row.
    begin: int
    end: int
    #: int64 ``[pages]``; ``None`` where all that it sees was computed in this very step.
    pages: Tensor | None
    width: int
    #: Additive, ``[end - begin, width]``; ``None`` means plainly causal.
    mask: Tensor | None


Views: TypeAlias = "tuple[list[DecodeView], list[PrefillView]]"
