"""Learning rate schedulers (`apex.nn.lr_scheduler`) and optimizers with Colossal-AI's names (`apex.nn.optimizer`)."""

from .._lazy import lazy_subpackages
from .optimizer import __all__ as _OPTIMIZERS

_SCHEDULERS = (
    *("ConstantWarmupLR", "CosineAnnealingLR", "CosineAnnealingWarmupLR", "ExponentialLR", "FlatAnnealingLR"),
    *("FlatAnnealingWarmupLR", "LambdaLR", "LinearWarmupLR", "MultiStepLR", "MultiStepWarmupLR", "MultiplicativeLR"),
    *("OneCycleLR", "PolynomialLR", "PolynomialWarmupLR", "StepLR"),
)
_MEMBERS = {**dict.fromkeys(_OPTIMIZERS, "optimizer"), **dict.fromkeys(_SCHEDULERS, "lr_scheduler")}

__all__ = ["lr_scheduler", "optimizer", *sorted(_MEMBERS)]

__getattr__, __dir__ = lazy_subpackages(__name__, ("lr_scheduler", "optimizer"), _MEMBERS)
