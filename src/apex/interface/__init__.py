"""The Booster's wrappers at Colossal-AI's path."""

from ..booster.wrappers import ModelWrapper, OptimizerWrapper

__all__ = ["ModelWrapper", "OptimizerWrapper"]
