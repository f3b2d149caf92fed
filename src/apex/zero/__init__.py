"""ZeRO optimizers at Colossal-AI's path."""

from .._lazy import lazy_subpackages

__all__ = ["LowLevelZeroOptimizer"]

__getattr__, __dir__ = lazy_subpackages(__name__, ("low_level",), {"LowLevelZeroOptimizer": "low_level"})
