"""NpuFusedAdamP: AdamP on combined parameters and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.multi_tensor import rules
from ..ops.multi_tensor.rows import RowLists, make_row_lists, row_count, rows_are_stretches
from ..ops.multi_tensor.tables import upload
from ._base import Skip, check_betas, check_hyperparameters
from ._buckets import Bucket
from ._combined import NpuFusedOptimizerBase
from ._own_steps import OwnSteps

_ROWS = "rows"
_THRESHOLDS = "thresholds"


class NpuFusedAdamP(NpuFusedOptimizerBase, OwnSteps):
    """AdamP (https://arxiv.org/abs/2006.08217): Adam that does not lengthen weights whose length has no effect.

    A parameter of two or more dimensions counts as such when its gradient is nearly at right angles to it: when for
    each channel (each index of dimension 0) the cosine of the angle is below `delta` over the root of the channel's
    size, or else for the parameter as a whole below `delta` over the root of its size. Its step then loses what is
    parallel to the channel, or to the whole, and its decoupled `weight_decay` is multiplied by `wd_ratio`.
    """

    _takes_shards = False

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
        *,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        capturable: bool = False,
    ) -> None:
        check_hyperparameters(lr=lr, eps=eps, weight_decay=weight_decay, delta=delta, wd_ratio=wd_ratio)
        check_betas(betas)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "delta": delta,
            "wd_ratio": wd_ratio,
            "nesterov": nesterov,
        }
        super().__init__(
            params,
            defaults,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            capturable=capturable,
        )

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return "exp_avg", "exp_avg_sq"

    def _kind(self, param: Tensor, state: dict[str, Any]) -> Any:
        # Rows that are no stretches of memory are nothing that a kernel could walk along.
        return super()._kind(param, state), rows_are_stretches(param)

    def _update(self, group: dict[str, Any], bucket: Bucket, step: Any, skip: Skip, seed: int | None) -> None:
        slots, copy = bucket.slots()
        rows: RowLists | None = bucket.kept.get(_ROWS)
        if rows is None:
            rows = bucket.kept[_ROWS] = make_row_lists(slots, copy)
            bucket.kept[_THRESHOLDS] = _thresholds(bucket.params, bucket.device)
        else:
            rows.point_to(slots, copy)
        beta1, beta2 = group["betas"]
        hyper = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"]}
        hyper["step"] = self._step_of(bucket, step)
        nesterov = bool(group["nesterov"])
        scaling: dict[str, Any] = {"noop": skip.noop, "grad_scale": skip.inverse_scale}
        found = rows.apply(rules.ADAMP_MEASURE, hyper, (nesterov,), **scaling)
        assert found is not None
        whole = _projection(found, rows, bucket.kept[_THRESHOLDS], group)
        rule = rules.ADAMP_NESTEROV if nesterov else rules.ADAMP
        rows.apply(rule, hyper, (nesterov,), whole=whole, seed=seed, **scaling)


def _thresholds(params: Sequence[Tensor], device: torch.device) -> Tensor:
    """Cosines, over delta, below which a parameter is projected: by channel and as a whole. 0 where it never is."""
    sizes = [
        (param.numel() // row_count(param), param.numel()) if param.ndim > 1 and param.numel() else (0, 0)
        for param in params
    ]
    roots = [[size**-0.5 if size else 0.0 for size in column] for column in zip(*sizes, strict=True)]
    return upload(roots, torch.float32, device)


def _projection(found: Tensor, rows: RowLists, thresholds: Tensor, group: dict[str, Any]) -> Tensor:
    """For each row, how much of the parameter is taken out of the step, and by how much the parameter shrinks.

    `found` has for each row the sums of p * g, g * g, p * p and p * step.
    """
    eps = group["eps"]

    def cosine(sums: Tensor) -> Tensor:
        return sums[:, 0].abs() / ((sums[:, 1].sqrt() + eps) * (sums[:, 2].sqrt() + eps))

    def parallel(sums: Tensor) -> Tensor:
        return sums[:, 3] / (sums[:, 2].sqrt() + eps).square()

    totals = rows.of_tensors(found)
    limits = thresholds * group["delta"]
    by_channel = rows.of_tensors(cosine(found).unsqueeze(1), maximum=True)[:, 0] < limits[0]
    as_a_whole = (cosine(totals) < limits[1]) & ~by_channel
    share = torch.where(as_a_whole, parallel(totals), 0.0)
    decay = group["lr"] * group["weight_decay"]
    shrink = torch.where(by_channel | as_a_whole, decay * group["wd_ratio"], decay).to(share.dtype)
    of_rows = torch.where(by_channel[rows.owner], parallel(found), share[rows.owner])
    return torch.stack((of_rows, shrink[rows.owner]), 1)
