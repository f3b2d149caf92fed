"""FusedLion: moves by the sign of an average of gradients, with one state tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ..ops.multi_tensor import rules
from ._base import AllOptions, EncodingOptimizer, LossScaling
from ._buckets import Group, UpdateBucket


class FusedLion(EncodingOptimizer):
    """Lion (https://arxiv.org/abs/2302.06675) with decoupled weight decay.

        p <- p - lr (sign(lerp(m, g, 1 - beta1)) + weight_decay p)
        m <- lerp(m, g, 1 - beta2)

    Its learning rate is 3 to 10 times smaller than AdamW's, its weight decay as many times larger.
    `cautious_weight_decay` decays only elements whose decay has the sign of their update. `FusedOptimizer` describes
    the keyword options, docs/state_formats.md `state_format` and `master_bits`.
    """

    _counts_steps = False
    _encodable: Mapping[str, str] = MappingProxyType({"exp_avg": "signed"})

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        cautious_weight_decay: bool = False,
        **options: Unpack[AllOptions],
    ) -> None:
        defaults: dict[str, Any] = dict(lr=lr, betas=betas, weight_decay=weight_decay)
        super().__init__(params, defaults | {"cautious_weight_decay": cautious_weight_decay}, **options)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return ("exp_avg",)

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        beta1, beta2 = group["betas"]
        hyper = {"lr": group["lr"], "weight_decay": group["weight_decay"], "beta1": beta1, "beta2": beta2}
        bucket.lists.apply(rules.LION, hyper, (bool(group["cautious_weight_decay"]),), seed=seed, **scaling.arguments)
