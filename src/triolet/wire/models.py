"""``/v1/models``: which models are served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from triolet.core import ModelInfo


class ModelBody(TypedDict):
    """One served name of a model."""

    id: str
    object: Literal["model"]
    #: Unix seconds.
    created: int
    owned_by: str
    #: Ours, and vLLM's: prompt and output tokens of one request together.
    max_model_len: int


class ModelList(TypedDict):
    """All names that a request's ``model`` may have."""

    object: Literal["list"]
    data: list[ModelBody]


def model_body(info: ModelInfo, name: str) -> ModelBody:
    """Write one of a model's names."""
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "triolet",
        "max_model_len": info.max_model_len,
    }


def model_list(*infos: ModelInfo) -> ModelList:
    """Write all names of all models, in their order; none while a model is still loading."""
    return {
        "object": "list",
        "data": [model_body(info, name) for info in infos for name in info.names],
    }
