"""Layer norms for models with sequence parallelism.

If each tensor-parallel rank normalises its part of the sequence, the gradients of weight and bias must be summed over
the ranks. The attribute `sequence_parallel_enabled` of a parameter tells `finalize_model_grads` to do this.
"""

from __future__ import annotations

from typing import Any

from ..._arguments import checked
from ...contrib.layer_norm import FastLayerNorm as OrigFastLayerNorm
from ...normalization import FusedLayerNorm as OrigFusedLayerNorm
from ...normalization import MixedFusedLayerNorm as OrigMixedFusedLayerNorm
from .._marks import MarkedModule


class _SequenceParallel(MarkedModule):
    """A mixin that sets `sequence_parallel_enabled` on a norm and its parameters."""

    def __init__(self, *args: Any, sequence_parallel_enabled: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        for parameter in self.parameters(recurse=False):
            parameter.sequence_parallel_enabled = sequence_parallel_enabled  # type: ignore[attr-defined]


class FusedLayerNorm(_SequenceParallel, OrigFusedLayerNorm):
    """`apex.normalization.FusedLayerNorm` with `sequence_parallel_enabled` on itself and its parameters."""


class MixedFusedLayerNorm(_SequenceParallel, OrigMixedFusedLayerNorm):
    """`apex.normalization.MixedFusedLayerNorm` with `sequence_parallel_enabled` on itself and its parameters."""


class FastLayerNorm(_SequenceParallel, OrigFastLayerNorm):
    """`apex.contrib.layer_norm.FastLayerNorm` with `sequence_parallel_enabled` on itself and its parameters."""

    @checked
    def __init__(self, hidden_size: int, eps: float = 1e-5, *, sequence_parallel_enabled: bool = False) -> None:
        super().__init__(hidden_size, eps, sequence_parallel_enabled=sequence_parallel_enabled)
