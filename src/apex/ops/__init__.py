"""Fused operators: one folder per family, one dispatch (`_library`), one launcher (`_launch`)."""

import importlib
import pkgutil
from collections.abc import Mapping

from . import _library
from ._library import FAMILIES, OpFamily, explain, implementation
from .norm import layer_norm, rms_norm
from .rope import rotary_embedding, rotary_embedding_pair
from .softmax import masked_softmax

__all__ = [
    "FAMILIES",
    "all_families",
    "explain",
    "implementation",
    "layer_norm",
    "masked_softmax",
    "rms_norm",
    "rotary_embedding",
    "rotary_embedding_pair",
]


def all_families() -> Mapping[str, OpFamily]:
    """Import every family and return them all by name. `FAMILIES` holds only the families imported so far."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        if module.ispkg:
            importlib.import_module(module.name)
    return _library.FAMILIES
