"""One front for training: a precision, a plugin, checkpoints. See docs/booster.md."""

from . import mixed_precision, plugin
from .booster import Booster
from .wrappers import ModelWrapper, OptimizerWrapper

__all__ = ["Booster", "ModelWrapper", "OptimizerWrapper", "mixed_precision", "plugin"]
