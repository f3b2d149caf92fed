"""One front for training: a precision, a plugin, checkpoints. See docs/booster.md."""

from . import mixed_precision, plugin
from ._report import StageReport, StageRow
from ._shorthand import boost
from ._step import BoostedStep
from .booster import Booster
from .wrappers import ModelWrapper, OptimizerWrapper

__all__ = [
    "BoostedStep",
    "Booster",
    "ModelWrapper",
    "OptimizerWrapper",
    "StageReport",
    "StageRow",
    "boost",
    "mixed_precision",
    "plugin",
]
