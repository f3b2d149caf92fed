"""Layer norms for models with sequence parallelism.

Where each tensor-parallel rank normalises its part of the sequence, the gradients of weight and bias must be summed
over the ranks; `sequence_parallel_enabled` on the parameters says so to `finalize_model_grads`.
"""

from __future__ import annotations

from typing import Any

import torch

from ...normalization import FusedLayerNorm as OrigFusedLayerNorm
from ...normalization import MixedFusedLayerNorm as OrigMixedFusedLayerNorm

__all__ = ["FastLayerNorm", "FusedLayerNorm", "MixedFusedLayerNorm"]


def _note_sequence_parallel(module: torch.nn.Module, enabled: bool) -> None:
    module.sequence_parallel_enabled = enabled  # type: ignore[assignment]
    for parameter in module.parameters(recurse=False):
        parameter.sequence_parallel_enabled = enabled  # type: ignore[attr-defined]


class FusedLayerNorm(OrigFusedLayerNorm):
    """`apex.normalization.FusedLayerNorm` that notes `sequence_parallel_enabled` on itself and its parameters."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        *,
        sequence_parallel_enabled: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        _note_sequence_parallel(self, sequence_parallel_enabled)


class MixedFusedLayerNorm(OrigMixedFusedLayerNorm):
    """The same of the norm whose output has the weight's dtype."""

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, **kwargs: Any) -> None:
        enabled = kwargs.pop("sequence_parallel_enabled", False)
        super().__init__(normalized_shape, eps, **kwargs)
        _note_sequence_parallel(self, enabled)


class FastLayerNorm(FusedLayerNorm):
    """The same under the name of the norm for large hidden sizes: here one kernel serves all sizes."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, *, sequence_parallel_enabled: bool = False) -> None:
        super().__init__(hidden_size, eps, True, sequence_parallel_enabled=sequence_parallel_enabled)
