"""The mixed precisions of `apex.booster`, under the name that scripts import them by."""

from .booster.mixed_precision import (
    BF16MixedPrecision,
    FP8MixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    MixedPrecision,
    mixed_precision_factory,
)

__all__ = [
    "BF16MixedPrecision",
    "FP8MixedPrecision",
    "FP16ApexMixedPrecision",
    "FP16NaiveMixedPrecision",
    "FP16TorchMixedPrecision",
    "MixedPrecision",
    "mixed_precision_factory",
]
