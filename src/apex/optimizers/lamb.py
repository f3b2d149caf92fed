"""Lamb: LAMB as in early PyTorch trainings of BERT, on combined parameters and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ..ops.multi_tensor import rules
from ._base import LossScaling, Options, adam_hyperparameters
from ._buckets import Group, UpdateBucket
from ._norms import clipped_together
from ._npu_base import NpuFusedOptimizerBase

# Larger weight norms are replaced by this norm.
LONGEST_WEIGHT = 10.0


class Lamb(NpuFusedOptimizerBase):
    """LAMB without bias correction, with the norm of the weights clamped to 10.

    Each parameter moves by `lr * min(|p|, 10) / |u| * u`, where u is Adam's step plus `weight_decay * p`. It moves by
    `lr * u` if a norm is zero, and with `adam`. With `use_global_grad_norm`, gradients are first divided by their joint
    norm if it exceeds 1. `apex.optimizers.FusedLAMB` is LAMB with bias correction.
    """

    _counts_steps = False
    _measures = True

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
        self.adam = adam
        self.use_global_grad_norm = use_global_grad_norm
        # Factor for this step's gradients: clipping and loss scale combined.
        self._clipping: LossScaling | None = None
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **options)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return "exp_avg", "exp_avg_sq"

    def _before_update(self, scaling: LossScaling) -> None:
        buckets = [bucket for _, bucket in self._ready]
        self._clipping = clipped_together(buckets, scaling, 1.0) if self.use_global_grad_norm else None

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        hyper = adam_hyperparameters(group, step)
        lists, flags = bucket.lists, (True,)
        factor = (self._clipping or scaling).on(bucket.device).inverse_scale
        if self.adam:
            lists.apply(rules.LAMB_UNSCALED, hyper, flags, noop=scaling.found_inf, grad_scale=factor, seed=seed)
            return
        squares = lists.apply(rules.LAMB_MOMENTS, hyper, flags, noop=scaling.found_inf, grad_scale=factor)
        assert squares is not None
        squares = bucket.over_shards(squares)
        squares[:, 0].clamp_(max=LONGEST_WEIGHT**2)
        lists.apply(rules.LAMB_STEP, hyper, flags, noop=scaling.found_inf, whole=squares, seed=seed)
