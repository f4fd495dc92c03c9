"""The sampling defaults that a model brings along in its ``generation_config.json``."""

from __future__ import annotations

import logging
import math
from types import MappingProxyType
from typing import TYPE_CHECKING

from triolet.wire.codec import FieldError, Within
from triolet.wire.sampling import MAX_REPETITION_PENALTY, MAX_TOKEN_ID, MIN_REPETITION_PENALTY

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

#: What we take of it, and the values that a request might have had as well. The rest says how
#: transformers generates (``do_sample``, ``use_cache``), or has fields of its own (stop ids).
DEFAULTS: Mapping[str, Within] = MappingProxyType({
    "temperature": Within(0, 2),
    "top_p": Within(0, 1, low_open=True),
    "top_k": Within(0, MAX_TOKEN_ID),
    "min_p": Within(0, 1),
    "repetition_penalty": Within(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "max_new_tokens": Within(1),
})


def default_sampling(config: Mapping[str, object]) -> Mapping[str, float]:
    """What requests mean that leave a field out.

    A value that no request could have is left out with a warning: a model that loads is worth
    more than its authors' slip.

    Args:
        config: The generation config, as a dictionary of what was set in it.
    """
    found: dict[str, float] = {}
    for name, limit in DEFAULTS.items():
        value = config.get(name)
        if isinstance(value, (int, float)) and _is_allowed(value, limit):
            found[name] = value
        elif value is not None:
            logger.warning("generation config: %s is %r and is ignored.", name, value)
    if found:
        shown = ", ".join(f"{name} {value:g}" for name, value in found.items())
        logger.info("defaults of the model: %s (--generation-config none for OpenAI's)", shown)
    return MappingProxyType(found)


def _is_allowed(value: float, limit: Within) -> bool:
    # Booleans are integers to Python, and no bound is above NaN or below it.
    if isinstance(value, bool) or math.isnan(value):
        return False
    try:
        limit.check(value)
    except FieldError:
        return False
    return True
