"""NpuFusedRMSprop, and NpuFusedRMSpropTF with TensorFlow's formula: RMSprop on combined parameters and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops.multi_tensor import rules
from ._base import LossScaling, Options, state_dtype
from ._buckets import Group, UpdateBucket
from ._npu_base import NpuFusedOptimizerBase

_RULES = (rules.RMSPROP, rules.RMSPROP_MORE, rules.RMSPROP_ALL)


class NpuFusedRMSprop(NpuFusedOptimizerBase):
    """RMSprop with the numbers of `torch.optim.RMSprop`; their state dicts are interchangeable."""

    _counts_steps = False

    # TensorFlow adds epsilon below the root.
    _epsilon_below_root = False
    # Further defaults of a subclass.
    _more_defaults: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = dict(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered)
        super().__init__(params, {**defaults, **self._more_defaults}, **options)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        buffer = ("momentum_buffer",) if group["momentum"] > 0 else ()
        mean = ("grad_avg",) if group["centered"] else ()
        return ("square_avg", *buffer, *mean)

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        return {name: group[name] for name in ("lr", "alpha", "eps", "weight_decay", "momentum")}

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        flags = (bool(group["centered"]), group["momentum"] > 0, self._epsilon_below_root)
        bucket.lists.apply(_RULES[flags[0] + flags[1]], self._hyper(group), flags, **scaling.arguments, seed=seed)


class NpuFusedRMSpropTF(NpuFusedRMSprop):
    """RMSprop with TensorFlow's numbers, as in timm.

    The mean square starts at one instead of zero and epsilon is added below the root, so that first steps are small.
    With `lr_in_momentum` the momentum buffer accumulates updates that include the learning rate, so that a change of
    the learning rate acts with delay. `decoupled_decay` shrinks the parameter by `lr * weight_decay` instead of adding
    the decay to the gradient.
    """

    _epsilon_below_root = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.9,
        eps: float = 1e-10,
        weight_decay: float = 0,
        momentum: float = 0.0,
        centered: bool = False,
        decoupled_decay: bool = False,
        lr_in_momentum: bool = True,
        **options: Unpack[Options],
    ) -> None:
        self._more_defaults = {"decoupled_decay": decoupled_decay, "lr_in_momentum": lr_in_momentum}
        super().__init__(params, lr, alpha, eps, weight_decay, momentum, centered, **options)

    def _initial_state(self, name: str, param: Tensor, group: dict[str, Any]) -> Tensor:
        if name == "square_avg":
            return torch.ones_like(param, dtype=state_dtype(param), memory_format=torch.preserve_format)
        return super()._initial_state(name, param, group)

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        within = bool(group["lr_in_momentum"]) and group["momentum"] > 0
        return {**super()._hyper(group), "decoupled": bool(group["decoupled_decay"]), "lr_in_momentum": within}
