"""FusedLAMB: LAMB in three passes over all parameters, with eleven reads or writes per element in all.

FusedMixedPrecisionLamb is FusedLAMB with its step count and learning rate on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops._host import HOST
from ..ops.multi_tensor import lamb_step, rules
from ._base import FusedOptimizer, LossScaling, Options, adam_hyperparameters, compiled_function, run_closure
from ._buckets import MASTER, Group, UpdateBucket
from ._checks import check_cautious, check_options, check_step
from ._norms import clipped_together


class FusedLAMB(FusedOptimizer):
    """LAMB (https://arxiv.org/abs/1904.00962): Adam's step, scaled to lr times the norm of the parameter.

    - If the gradients' global norm exceeds `max_grad_norm`, they are first scaled down to it; 0 or None turns this off.
      All groups share the norm and the limit.
    - Parameters without weight decay take Adam's step unscaled; `use_nvlamb` scales it for them too.
    - `adam_w_mode` adds the decay to the step, else to the gradient.
    - `cautious_weight_decay` decays only elements whose decay has the sign of their step; needs `adam_w_mode`.
    - `grad_averaging=False` adds the whole gradient to the first moment instead of 1 - beta1 times the gradient.

    Gradients are not changed, whereas the original overwrites them. `FusedOptimizer` describes the keyword options.
    """

    _measures = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        *,
        cautious_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        if amsgrad:
            raise RuntimeError(f"{type(self).__name__} does not support the AMSGrad variant")
        defaults: dict[str, Any] = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps)
        defaults |= dict(weight_decay=weight_decay, grad_averaging=grad_averaging, max_grad_norm=max_grad_norm)
        defaults |= dict(cautious_weight_decay=cautious_weight_decay)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        # Factor for this step's gradients: clipping and loss scale combined.
        self._clipping: LossScaling | None = None
        super().__init__(params, defaults, set_grad_none=set_grad_none, **options)

    multi_tensor_lamb = compiled_function("multi_tensor_lamb")

    multi_tensor_l2norm = compiled_function("multi_tensor_l2norm")

    @property
    def max_grad_norm(self) -> float | None:
        """Return the largest norm of all gradients together, which a group cannot have of its own."""
        return self.defaults["max_grad_norm"]

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        if options.get("cautious_weight_decay"):
            check_cautious(False, self.adam_w_mode)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return ("exp_avg", "exp_avg_sq")

    def _before_update(self, scaling: LossScaling) -> None:
        limit = self.max_grad_norm
        self._clipping = clipped_together([bucket for _, bucket in self._ready], scaling, limit) if limit else None

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        if self._clipping is not None:
            scaling = self._clipping.on(bucket.device)
        flags = bool(self.adam_w_mode), bool(group.get("cautious_weight_decay"))
        hyper = adam_hyperparameters(group, step, grad_averaging=bool(group["grad_averaging"]))
        if not (self.use_nvlamb or group["weight_decay"]):
            bucket.lists.apply(rules.LAMB_UNSCALED, hyper, flags, seed=seed, **scaling.arguments)
            return
        lamb_step(bucket.lists, hyper, flags, seed=seed, over_shards=bucket.over_shards, **scaling.arguments)


class FusedMixedPrecisionLamb(FusedLAMB):
    """`FusedLAMB` for CUDA graphs and loss scaling: no step waits for the device or needs values from the host.

    Parameters of `reduced_precision_dtype` get float32 masters at their first step, which are saved with the state
    (the original loses them). `lr` and `step` of a group are tensors on the device of its parameters. Schedulers fill
    them in place. `step` (int32 [1]) does not count steps skipped for an overflow.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        step: int | Tensor = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
        *,
        master_weights: bool = False,
        cautious_weight_decay: bool = False,
    ) -> None:
        check_options({"lr": lr})
        check_step("step", step)
        self.reduced_precision_dtype = reduced_precision_dtype
        self._initial_step = int(step)
        adam = (_number(lr, torch.float32, None), bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)
        lamb: dict[str, Any] = dict(grad_averaging=grad_averaging, max_grad_norm=max_grad_norm, use_nvlamb=use_nvlamb)
        lamb |= dict(cautious_weight_decay=cautious_weight_decay)
        super().__init__(params, *adam, **lamb, master_weights=master_weights, capturable=True)
        self.defaults["step"] = torch.tensor([self._initial_step], dtype=torch.int32, device=HOST)

    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, **scaler: Any
    ) -> Any:
        """Perform one step and return the closure's loss; takes a `torch.amp.GradScaler` as `grad_scaler`."""
        loss = run_closure(closure)
        self._step(self._loss_scaling(**scaler))
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group with its own learning rate and step count on its device."""
        super().add_param_group(param_group)
        self._move_numbers(self.param_groups[-1])

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of `FusedLAMB`."""
        super()._load(state_dict)
        for group in self.param_groups:
            self._move_numbers(group)

    @property
    def param_groups_full_precision(self) -> list[dict[str, list[Tensor | None]]]:
        """Return the float32 masters by group, None for parameters without one; empty before the first step."""
        if not self.state:
            return []
        return [{"params": [self.state[p].get(MASTER) for p in group["params"]]} for group in self.param_groups]

    def _move_numbers(self, group: dict[str, Any]) -> None:
        device = group["params"][0].device if group["params"] else None
        group["lr"] = _number(group["lr"], torch.float32, device)
        group["step"] = _number(group.get("step", self._initial_step), torch.int32, device).reshape(1)

    def _prepare(self, param: Tensor, group: dict[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], Any]:
        state = self.state[param]
        if param.dtype == self.reduced_precision_dtype and MASTER not in state:
            state[MASTER] = param.detach().to(torch.float32, copy=True)
        return super()._prepare(param, group, names)


def _number(value: float | Tensor, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Return a new tensor, so that groups with the same default do not share it; `device` None keeps its device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, dtype, copy=True)
    return torch.tensor(value, dtype=dtype, device=HOST if device is None else device)
