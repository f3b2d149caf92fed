"""One front for training: a precision, a plugin, checkpoints. See docs/booster.md."""

from . import mixed_precision, plugin
from ._report import StageReport, StageRow
from ._shorthand import boost
from ._step import BoostedStep
from .accelerator import Accelerator
from .booster import Booster
from .plugin import Plugin
from .wrappers import ModelWrapper, OptimizerWrapper

__all__ = [
    "Accelerator",
    "BoostedStep",
    "Booster",
    "ModelWrapper",
    "OptimizerWrapper",
    "Plugin",
    "StageReport",
    "StageRow",
    "boost",
    "mixed_precision",
    "plugin",
]
