"""FusedAdamSWA: Adam, stochastic weight averaging and copies of the weights in the compute dtype, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, unique
from typing import Any

import torch
from torch import Tensor

from ...ops._host import HOST
from ...ops.multi_tensor import rules
from ...optimizers._base import FusedOptimizer, LossScaling, adam_hyperparameters, run_closure
from ...optimizers._buckets import Group, UpdateBucket
from ...optimizers._checks import check_decay
from ...optimizers.fused_adam import FusedAdam

# The key of a parameter's average in its optimizer state during a step.
_AVERAGE = "swa_param"


@unique
class AdamMathType(Enum):
    """The way weight decay is applied: added to the gradient (`ApexAdam`, `PyTorchAdam`) or decoupled (`ApexAdamW`).

    `ApexAdam` and `PyTorchAdam` are two ways to write the same formula and give the same results here.
    """

    ApexAdam = 0
    ApexAdamW = 1
    PyTorchAdam = 2


class FusedAdamSWA(FusedOptimizer):
    """Adam on `params`, with gradients of `compute_params`, and an exponential moving average of the results.

    - `params`: the weights to update, for example in float32;
    - `compute_params`: the same weights for forward and backward passes, for example in bfloat16. They hold the
      gradients and receive a copy of the updated weights;
    - `swa_params`: the averages, average += (1 - swa_decay_rate) * (weight - average). The first step sets them to the
      weights.

    The three lists match tensor by tensor; one pass updates them all. A parameter without a gradient stays unchanged,
    but its average is still updated. The averages and their count, `swa_param_groups[0]["n_averaged"]`, are not part of
    the state dict.
    """

    _takes_model_grads = True
    _may_lack = frozenset({_AVERAGE})

    def __init__(
        self,
        params: Iterable[Tensor],
        compute_params: Iterable[Tensor],
        swa_params: Iterable[Tensor],
        swa_decay_rate: float,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_math_mode: AdamMathType = AdamMathType.PyTorchAdam,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        params, compute_params, swa_params = list(params), list(compute_params), list(swa_params)
        _check_lists(params, compute_params, swa_params)
        for name, requested in (("amsgrad", amsgrad), ("capturable", capturable), ("master_weights", master_weights)):
            if requested:
                raise NotImplementedError(f"FusedAdamSWA does not support {name}=True")
        if not isinstance(adam_math_mode, AdamMathType):
            raise ValueError(
                f"adam_math_mode={adam_math_mode!r} is not known; it must be one of {', '.join(map(str, AdamMathType))}"
            )
        if not 0.0 <= swa_decay_rate <= 1.0:
            raise ValueError(f"swa_decay_rate={swa_decay_rate} is not in [0, 1]")
        self.adam_math_mode = adam_math_mode
        self.swa_decay_rate = swa_decay_rate
        self.compute_param_groups = [{"params": compute_params}]
        self.swa_param_groups: list[dict[str, Any]] = [{"params": swa_params, "n_averaged": 0}]
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults, set_grad_none=set_grad_none)
        self._pair_up()

    def _pair_up(self) -> None:
        params = self.param_groups[0]["params"]
        self._computed = dict(zip(params, self.compute_param_groups[0]["params"], strict=True))
        self._averages = dict(zip(params, self.swa_param_groups[0]["params"], strict=True))

    @property
    def _model_params(self) -> dict[Tensor, Tensor]:  # type: ignore[override]
        """Return the compute parameter, which has the gradient and receives the copy, of each parameter."""
        return self._computed

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise ValueError("FusedAdamSWA takes one parameter group: the lists beside it have no others")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients of `params` and of `compute_params`."""
        super().zero_grad(set_to_none)
        frees = self.set_grad_none if set_to_none is None else set_to_none
        for param in self.compute_param_groups[0]["params"]:
            if param.grad is not None and frees:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()

    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, grad_clip_scale: Tensor | float | None = None
    ) -> Any:
        """Perform one step on gradients multiplied by `grad_clip_scale`, and return the closure's loss."""
        loss = run_closure(closure)
        scaling = self._loss_scaling()
        if grad_clip_scale is not None:
            scaling = LossScaling(
                scaling.found_inf, self._combined(scaling.inverse_scale, grad_clip_scale), scaling.unscale
            )
        if scaling.found_inf is not None and self.swa_param_groups[0]["n_averaged"] == 0:
            # A step skipped for an overflow, which the host does not see, must not leave averages uninitialized.
            self._start_averages(list(self._averages))
        self._step(scaling)
        self._average_the_rest()
        self.swa_param_groups[0]["n_averaged"] += 1
        return loss

    def _combined(self, inverse_scale: Tensor | None, clip: Tensor | float) -> Tensor:
        device = self.param_groups[0]["params"][0].device
        factor = (
            clip.detach().reshape(1).to(device, torch.float32, non_blocking=device != HOST)
            if isinstance(clip, Tensor)
            else torch.full((1,), clip, dtype=torch.float32, device=device)
        )
        return factor if inverse_scale is None else factor * inverse_scale.to(device)

    def _before_buckets(self, index: int, group: dict[str, Any]) -> None:
        """Store the averages in the parameters' state, because buckets take their tensors there."""
        for param, average in self._averages.items():
            self.state[param][_AVERAGE] = average

    @torch.no_grad()
    def _start_averages(self, params: list[Tensor]) -> None:
        torch._foreach_copy_([self._averages[param] for param in params], params)

    @torch.no_grad()
    def _average_the_rest(self) -> None:
        """Update the averages of parameters without a gradient, which belong to no bucket."""
        rest = [param for param, computed in self._computed.items() if computed.grad is None]
        if rest and self.swa_param_groups[0]["n_averaged"] == 0:
            self._start_averages(rest)
        elif rest:
            torch._foreach_lerp_([self._averages[param] for param in rest], rest, 1 - self.swa_decay_rate)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        decoupled = self.adam_math_mode is AdamMathType.ApexAdamW
        other = AdamMathType.PyTorchAdam if decoupled else AdamMathType.ApexAdamW
        check_decay(options, decoupled, f"use FusedAdamSWA(adam_math_mode={other})")

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return "exp_avg", "exp_avg_sq", _AVERAGE

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        decoupled = self.adam_math_mode is AdamMathType.ApexAdamW
        hyper = adam_hyperparameters(group, step, decoupled=decoupled, average_decay=self.swa_decay_rate)
        bucket.lists.apply(
            rules.ADAM_AVERAGE,
            hyper,
            (decoupled, False, self.swa_param_groups[0]["n_averaged"] == 0),
            **scaling.arguments,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's state in the format of `torch.optim.Adam`, which can load it."""
        whole = super().state_dict()
        without_averages = {
            param: {name: value for name, value in state.items() if name != _AVERAGE}
            for param, state in whole["state"].items()
        }
        return {**whole, "state": without_averages}

    def __getstate__(self) -> dict[str, Any]:
        lists = {name: getattr(self, name) for name in ("adam_math_mode", "compute_param_groups", "swa_param_groups")}
        return {**super().__getstate__(), **lists}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pair_up()

    @classmethod
    def from_optim(
        cls,
        adam_optimizer: torch.optim.Optimizer,
        fp32_params: Iterable[Tensor],
        bf16_params: Iterable[Tensor],
        swa_params: Iterable[Tensor],
        swa_decay_rate: float,
    ) -> FusedAdamSWA:
        """Return a FusedAdamSWA that continues from an Adam or AdamW, PyTorch's or fused, with one parameter group."""
        if not isinstance(adam_optimizer, torch.optim.Adam | torch.optim.AdamW | FusedAdam):
            raise TypeError(f"adam_optimizer is a {type(adam_optimizer).__name__}, not an Adam or AdamW")
        if len(adam_optimizer.param_groups) != 1:
            raise ValueError(f"adam_optimizer has {len(adam_optimizer.param_groups)} parameter groups; one is accepted")
        group = adam_optimizer.param_groups[0]
        state_dict = adam_optimizer.state_dict()
        steps = {int(state["step"]) for state in state_dict["state"].values() if "step" in state}
        if len(steps) > 1:
            raise ValueError(f"all parameters must have been updated equally often, not {sorted(steps)} times")
        is_adamw = getattr(adam_optimizer, "adam_w_mode", isinstance(adam_optimizer, torch.optim.AdamW))
        decoupled = group.get("decoupled_weight_decay", is_adamw)
        optimizer = cls(
            fp32_params,
            bf16_params,
            swa_params,
            swa_decay_rate,
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            amsgrad=group["amsgrad"],
            adam_math_mode=AdamMathType.ApexAdamW if decoupled else AdamMathType.PyTorchAdam,
        )
        optimizer.load_state_dict(state_dict)
        return optimizer


def _check_lists(params: list[Tensor], compute_params: list[Tensor], swa_params: list[Tensor]) -> None:
    """Raise an error unless the lists match, tensor by tensor."""
    lists = {"params": params, "compute_params": compute_params, "swa_params": swa_params}
    counts = {name: len(tensors) for name, tensors in lists.items()}
    if len(set(counts.values())) != 1 or not params:
        raise ValueError(f"the lists must be of one length, not empty; they have {counts}")
    for index, (param, compute, average) in enumerate(zip(*lists.values(), strict=True)):
        for name, tensor in (("compute_params", compute), ("swa_params", average)):
            if not isinstance(param, Tensor) or not isinstance(tensor, Tensor):
                raise TypeError(f"params[{index}] and {name}[{index}] must be tensors, not groups")
            if tensor.shape != param.shape or tensor.device != param.device:
                raise ValueError(
                    f"{name}[{index}] has shape {list(tensor.shape)} on {tensor.device}, params[{index}] "
                    f"{list(param.shape)} on {param.device}"
                )
        if average.dtype != param.dtype:
            raise ValueError(f"swa_params[{index}] is {average.dtype}, params[{index}] {param.dtype}")
