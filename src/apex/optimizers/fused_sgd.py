"""FusedSGD and FusedLARS: stochastic gradient descent with momentum; the first step is not dampened.

FusedSGD takes one pass over all parameters. FusedLARS, which has a learning rate per layer, takes two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required
from typing_extensions import Unpack

from ..ops.multi_tensor import rules
from ._base import CommonOptions, EncodingOptimizer, LossScaling, StateOptions, compiled_function, state_dtype
from ._buckets import Group, UpdateBucket
from ._checks import check_nesterov, check_options
from ._formats import saved_in_any_format

BUFFER = "momentum_buffer"
FRESH = "fresh"


class SGDOptions(CommonOptions, StateOptions, total=False):
    """Keyword options that upstream's FusedSGD does not have."""


class MomentumOptimizer(EncodingOptimizer):
    """Base of the optimizers with a momentum buffer."""

    _counts_steps = False
    # The buffer is missing before the first step that was not skipped, and without momentum.
    _may_lack = frozenset({BUFFER})

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        wd_after_momentum: bool,
        materialize_master_grads: bool,
        set_grad_none: bool,
        **options: Unpack[SGDOptions],
    ) -> None:
        check_options(defaults)
        check_nesterov(defaults)
        self.wd_after_momentum = wd_after_momentum
        # For parameters whose first step may have been skipped for an overflow: a device flag that says whether it was.
        self._undampened: dict[Tensor, Tensor] = {}
        more: dict[str, Any] = {"materialize_master_grads": materialize_master_grads, "set_grad_none": set_grad_none}
        super().__init__(params, defaults, **more, **options)

    def get_momentums(self, params: Iterable[Tensor]) -> tuple[list[Tensor], bool]:
        """Return the parameters' momentum buffers, creating missing ones, and whether the last one is new."""
        momentums, first_run = [], True
        for param in params:
            state = self.state[param]
            first_run = BUFFER not in state
            if first_run:
                state[BUFFER] = self._initial_state(BUFFER, param, {})
            momentums.append(state[BUFFER])
        return momentums, first_run

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return (BUFFER,) if group["momentum"] else ()

    def _prepare(self, param: Tensor, group: dict[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], Any]:
        """Put parameters whose momentum buffer may not have seen a step in separate buckets, if there is dampening."""
        fresh = not saved_in_any_format(BUFFER, self.state[param])
        if fresh:
            self._undampened.pop(param, None)
        state, _ = super()._prepare(param, group, names)
        if not names or not group["dampening"]:
            return state, None
        return state, FRESH if fresh else id(self._undampened[param]) if param in self._undampened else None

    def _first(self, bucket: UpdateBucket, scaling: LossScaling) -> bool | Tensor:
        """Return whether this is the bucket's first step: a tensor if earlier steps may have been skipped."""
        if bucket.kind is None:
            return False
        flag = self._undampened.get(bucket.params[0])
        if flag is None and bucket.kind == FRESH:
            if scaling.found_inf is None and not self.capturable:
                bucket.kind = None
                return True
            flag = torch.ones((), dtype=torch.float64, device=bucket.device)
            self._undampened.update(dict.fromkeys(bucket.params, flag))
        return False if flag is None else flag

    @staticmethod
    def _note_first(first: bool | Tensor, scaling: LossScaling) -> None:
        """Clear the first-step flag after a step, unless `found_inf` skipped the step."""
        if isinstance(first, Tensor):
            first.mul_(0.0 if scaling.found_inf is None else scaling.found_inf.reshape(()) != 0)

    def state_dict(self, *, decoded: bool = False) -> dict[str, Any]:
        """Return the state, including master weights, in the format of `torch.optim.SGD`, which can load it.

        State in another format than float32 is saved as it is stored, or as float32 numbers if `decoded`.
        """
        saved = super().state_dict(decoded=decoded)
        params = (param for group in self.param_groups for param in group["params"])
        indices = (index for group in saved["param_groups"] for index in group["params"])
        for param, index in zip(params, indices, strict=True):
            if param in self._undampened and bool(self._undampened[param]):
                state = saved["state"][index]
                saved["state"][index] = {name: v for name, v in state.items() if name.partition("::")[0] != BUFFER}
        return saved

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of `torch.optim.SGD`."""
        super()._load(state_dict)
        self._undampened.clear()

    def _rename_loaded_state(self) -> None:
        for state in self.state.values():
            if state.get(BUFFER, self) is None:  # torch.optim.SGD may save None before the first step
                del state[BUFFER]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._undampened = {}
        for group in self.param_groups:
            group.setdefault("nesterov", False)


def momentum_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of SGD's momentum: float32 for bfloat16 parameters, else the parameter's dtype."""
    return torch.float16 if param.dtype == torch.float16 else state_dtype(param)


class FusedSGD(MomentumOptimizer):
    """SGD with momentum, dampening, Nesterov's momentum and weight decay.

    It computes the same numbers as `torch.optim.SGD`, and each loads the other's state dicts. As in `torch.optim.SGD`,
    the momentum of float16 parameters without masters is float16. With `wd_after_momentum` the decay is added to the
    update instead of the gradient, and so stays out of the momentum. `FusedOptimizer` describes
    `materialize_master_grads` and the keyword options, docs/state_formats.md `state_format` and `master_bits`.
    """

    _encodable: Mapping[str, str] = MappingProxyType({BUFFER: "signed"})

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
        **options: Unpack[SGDOptions],
    ) -> None:
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        super().__init__(params, defaults, wd_after_momentum, materialize_master_grads, set_grad_none, **options)

    multi_tensor_sgd = compiled_function("multi_tensor_sgd")

    def _initial_state(self, name: str, param: Tensor, group: dict[str, Any]) -> Tensor:
        if self.master_weights:
            return super()._initial_state(name, param, group)
        return torch.zeros_like(param, dtype=momentum_dtype(param), memory_format=torch.preserve_format)

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        hyper: dict[str, Any] = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        if not bucket.names:
            bucket.lists.apply(rules.PLAIN_SGD, hyper, **scaling.arguments, seed=seed)
            return
        first = self._first(bucket, scaling)
        hyper |= {"momentum": group["momentum"], "dampening": group["dampening"], "first": first}
        bucket.lists.apply(
            rules.SGD,
            hyper,
            rules.sgd_flags(group["nesterov"], self.wd_after_momentum, [bucket.states[0][bucket.names[0]]]),
            **scaling.arguments,
            seed=seed,
        )
        self._note_first(first, scaling)


class FusedLARS(MomentumOptimizer):
    """Layer-wise adaptive rate scaling (https://arxiv.org/abs/1708.03888), as in ROCm's variant of Apex.

    The learning rate of a parameter w with gradient g is multiplied by

        trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)

    if neither norm is 0. The momentum buffer includes the learning rate: v = momentum * v - rate * (g + decay * w),
    w = w + v. A group with `is_skipped=True` (biases, norms) keeps its plain learning rate. The original ignores
    `dampening` and `wd_after_momentum`; here they act as in `FusedSGD`. `FusedOptimizer` describes
    `materialize_master_grads` and the keyword options.
    """

    _measures = True

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

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        adapts = not group["is_skipped"]
        norms = bucket.lists.apply(rules.LARS_NORMS, {}, **scaling.arguments) if adapts else None
        if norms is not None:
            norms = bucket.over_shards(norms)
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
