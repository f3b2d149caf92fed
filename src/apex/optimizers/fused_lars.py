"""FusedLARS: momentum SGD with a learning rate per layer, in two passes over all parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import required
from typing_extensions import Unpack

from ..ops.multi_tensor import rules
from ._base import CommonOptions, LossScaling, compiled_function
from ._buckets import Bucket
from ._momentum import MomentumOptimizer


class FusedLARS(MomentumOptimizer):
    """Layer-wise adaptive rate scaling (https://arxiv.org/abs/1708.03888), as ROCm's variant of Apex has it.

    The learning rate of a parameter w with gradient g is multiplied by

        trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)

    where neither norm is 0, and goes into the momentum buffer with the gradient: v = momentum * v - rate * (g + decay *
    w), w = w + v. A group with `is_skipped=True` (biases, norms) keeps its plain learning rate. The original takes
    `dampening` and `wd_after_momentum` and ignores them; here they do what they do in `FusedSGD`. See
    `FusedOptimizer` for `materialize_master_grads` and the options by keyword.
    """

    _takes_shards = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = required,  # type: ignore[assignment]
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
        **options: Unpack[CommonOptions],
    ) -> None:
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        defaults |= dict(trust_coefficient=trust_coefficient, eps=eps, is_skipped=False)
        self.trust_coefficient = trust_coefficient
        self.eps = eps
        super().__init__(params, defaults, wd_after_momentum, materialize_master_grads, set_grad_none, **options)

    multi_tensor_lars = compiled_function("multi_tensor_lars")

    def _update(self, group: dict[str, Any], bucket: Bucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        adapts = not group["is_skipped"]
        norms = bucket.lists.apply(rules.LARS_NORMS, {}, **scaling.arguments) if adapts else None
        first = self._first(bucket, scaling)
        hyper: dict[str, Any] = {
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "trust_coefficient": group["trust_coefficient"],
            "eps": group["eps"],
        }
        if bucket.names:
            hyper |= {"momentum": group["momentum"], "dampening": group["dampening"], "first": first}
        bucket.lists.apply(
            rules.LARS if bucket.names else rules.PLAIN_LARS,
            hyper,
            (bool(group["nesterov"]), bool(self.wd_after_momentum), adapts),
            whole=norms,
            seed=seed,
            **scaling.arguments,
        )
        self._note_first(first, scaling)
