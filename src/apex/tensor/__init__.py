"""Names of Colossal-AI's tensors: parameters here are PyTorch's."""

from __future__ import annotations

from .._lazy import lazy_subpackages
from .colo_parameter import ColoParameter

__all__ = ["ColoParameter"]

__getattr__, __dir__ = lazy_subpackages(__name__, ())
