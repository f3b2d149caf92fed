"""NpuFusedAdam, NpuFusedAdamW and NpuFusedAdamP: Adam and its variants on combined parameters and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ..ops.multi_tensor import rules
from ..ops.multi_tensor.rows import RowLists, make_row_lists, projection_thresholds, rows_are_stretches
from ._base import LossScaling, Options
from ._buckets import Bucket
from ._combined import NpuFusedOptimizerBase
from ._parameter_steps import ParameterSteps
from .fused_adam import FusedAdam

_THRESHOLDS = "thresholds"


class NpuFusedAdam(NpuFusedOptimizerBase, ParameterSteps, FusedAdam):
    """The numbers of `torch.optim.Adam`, with which state dicts are interchangeable: decay is added to the gradient."""

    _decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        numbers: dict[str, Any] = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, **numbers, amsgrad=amsgrad, adam_w_mode=self._decoupled, **options)

    def _update(self, group: dict[str, Any], bucket: Bucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        super()._update(group, bucket, self._step_of(bucket, step), scaling, seed)


class NpuFusedAdamW(NpuFusedAdam):
    """The numbers of `torch.optim.AdamW`, with which state dicts are interchangeable."""

    _decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


class NpuFusedAdamP(NpuFusedOptimizerBase, ParameterSteps):
    """AdamP (https://arxiv.org/abs/2006.08217): Adam that does not lengthen weights whose length has no effect.

    A parameter of two or more dimensions counts as such when its gradient is nearly at right angles to it: when for
    each channel (each index of dimension 0) the cosine of the angle is below `delta` over the root of the channel's
    size, or else for the parameter as a whole below `delta` over the root of its size. Its step then loses what is
    parallel to the channel, or to the whole, and its decoupled `weight_decay` is multiplied by `wd_ratio`.
    """

    _takes_shards = False
    _make_lists = staticmethod(make_row_lists)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, delta=delta, wd_ratio=wd_ratio, nesterov=nesterov
        )
        super().__init__(params, defaults, **options)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return "exp_avg", "exp_avg_sq"

    def _kind(self, param: Tensor, state: dict[str, Any]) -> Any:
        # Rows that are no stretches of memory are nothing that a kernel could walk along.
        return super()._kind(param, state), rows_are_stretches(param)

    def _update(self, group: dict[str, Any], bucket: Bucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        rows = bucket.lists
        assert isinstance(rows, RowLists)
        limits = bucket.kept.get(_THRESHOLDS)
        if limits is None:
            limits = bucket.kept[_THRESHOLDS] = projection_thresholds(bucket.params, bucket.device)
        beta1, beta2 = group["betas"]
        hyper = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"]}
        hyper["step"] = self._step_of(bucket, step)
        nesterov = bool(group["nesterov"])
        found = rows.apply(rules.ADAMP_MEASURE, hyper, (nesterov,), **scaling.arguments)
        assert found is not None
        whole = rows.project(
            found,
            limits,
            eps=group["eps"],
            delta=group["delta"],
            decay=group["lr"] * group["weight_decay"],
            ratio=group["wd_ratio"],
        )
        rule = rules.ADAMP_NESTEROV if nesterov else rules.ADAMP
        rows.apply(rule, hyper, (nesterov,), whole=whole, seed=seed, **scaling.arguments)
