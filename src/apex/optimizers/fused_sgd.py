"""FusedSGD: stochastic gradient descent, with or without momentum, in one pass over all parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required
from typing_extensions import Unpack

from ..ops.multi_tensor import rules
from ._base import CommonOptions, LossScaling, compiled_function
from ._buckets import Bucket
from ._momentum import BUFFER, MomentumOptimizer, momentum_dtype


class FusedSGD(MomentumOptimizer):
    """SGD with momentum, dampening, Nesterov's momentum and weight decay.

    The same numbers as `torch.optim.SGD`, whose state dicts it loads and which loads its own; as there, the momentum of
    float16 parameters without masters is float16. With `wd_after_momentum` the decay is added to the update instead of
    the gradient, so that the momentum does not see it. See `FusedOptimizer` for
    `materialize_master_grads` and the options by keyword.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = required,  # type: ignore[assignment]
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
        **options: Unpack[CommonOptions],
    ) -> None:
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        super().__init__(params, defaults, wd_after_momentum, materialize_master_grads, set_grad_none, **options)

    multi_tensor_sgd = compiled_function("multi_tensor_sgd")

    def _initial_state(self, name: str, param: Tensor, group: dict[str, Any]) -> Tensor:
        if self.master_weights:
            return super()._initial_state(name, param, group)
        return torch.zeros_like(param, dtype=momentum_dtype(param), memory_format=torch.preserve_format)

    def _update(self, group: dict[str, Any], bucket: Bucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        hyper: dict[str, Any] = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        if not bucket.names:
            bucket.lists.apply(rules.PLAIN_SGD, hyper, **scaling.arguments, seed=seed)
            return
        first = self._first(bucket, scaling)
        hyper |= {"momentum": group["momentum"], "dampening": group["dampening"], "first": first}
        bucket.lists.apply(
            rules.SGD,
            hyper,
            rules.sgd_flags(group["nesterov"], self.wd_after_momentum, [bucket.states[0][BUFFER]]),
            **scaling.arguments,
            seed=seed,
        )
        self._note_first(first, scaling)
