"""NpuFusedLamb: `Lamb` with gradients clipped by their norm over all parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ._base import LossScaling, Options
from ._norms import clipped_together
from .lamb import Lamb


class NpuFusedLamb(Lamb):
    """`Lamb`; with `use_global_grad_norm` gradients longer than 1, all taken together, are divided by their norm."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        use_global_grad_norm: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, adam, **options)
        self.use_global_grad_norm = use_global_grad_norm
        # What this step's gradients are multiplied by, the loss scale included.
        self._clipping: LossScaling | None = None

    def _before_update(self, scaling: LossScaling) -> None:
        buckets = [bucket for _, bucket in self._ready]
        self._clipping = clipped_together(buckets, scaling, 1.0) if self.use_global_grad_norm else None

    def _clipped(self, scaling: LossScaling) -> LossScaling:
        return self._clipping or scaling
