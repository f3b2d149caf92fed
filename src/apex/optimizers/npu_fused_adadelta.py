"""NpuFusedAdadelta: Adadelta on combined parameters and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ..ops.multi_tensor import rules
from ._base import LossScaling, Options
from ._buckets import Group, UpdateBucket
from ._npu_base import NpuFusedOptimizerBase


class NpuFusedAdadelta(NpuFusedOptimizerBase):
    """Adadelta with the numbers of `torch.optim.Adadelta`; their state dicts are interchangeable."""

    _counts_steps = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay}, **options)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return "square_avg", "acc_delta"

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        hyper = {name: group[name] for name in ("lr", "rho", "eps", "weight_decay")}
        bucket.lists.apply(rules.ADADELTA, hyper, **scaling.arguments, seed=seed)
