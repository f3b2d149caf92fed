"""One front for training: a precision, a plugin, checkpoints. See docs/booster.md."""

from . import mixed_precision, plugin
from .accelerator import Accelerator
from .booster import Booster
from .plugin import Plugin
from .wrappers import ModelWrapper, OptimizerWrapper

__all__ = ["Accelerator", "Booster", "ModelWrapper", "OptimizerWrapper", "Plugin", "mixed_precision", "plugin"]
