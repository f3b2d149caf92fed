"""FP16_Optimizer: float32 master weights and loss scaling around an optimizer whose `step` takes gradients."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor

from ..._delegation import delegated
from ...fp16_utils.loss_scaler import adapt_scale
from ...ops.multi_tensor import l2norm

logger = logging.getLogger("apex.contrib.optimizers")

# The keys of `dynamic_loss_args` and their defaults.
_DYNAMIC = {"init_scale": 2.0**16, "scale_factor": 2.0, "scale_window": 1000}


def _saved(dynamic: bool) -> list[str]:
    """Return the names of the attributes of the loss scale that are saved."""
    names = ["dynamic_loss_scale", "cur_scale", "cur_iter"]
    return [*names, "last_overflow_iter", "scale_factor", "scale_window"] if dynamic else names


class FP16_Optimizer:
    """A wrapper of `apex.contrib.optimizers.FusedAdam` or `FusedSGD` that updates float32 copies of the parameters.

    Call `backward(loss)` instead of `loss.backward()`. With `dynamic_loss_scale`, an overflow skips the step and
    divides the scale by `scale_factor`; `scale_window` steps without overflow multiply it. `dynamic_loss_args` sets
    these two and `init_scale`. The model's parameters may have any floating-point dtype.
    """

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if "grads" not in inspect.signature(init_optimizer.step).parameters:
            raise TypeError(
                f"init_optimizer is {type(init_optimizer).__name__}, whose step takes no `grads`; "
                "apex.contrib.optimizers.FusedAdam and FusedSGD are accepted"
            )
        arguments = dynamic_loss_args or {}
        if unknown := set(arguments) - set(_DYNAMIC):
            raise ValueError(f"dynamic_loss_args has {sorted(unknown)}; {sorted(_DYNAMIC)} are accepted")
        self.optimizer = init_optimizer
        self.verbose = verbose
        self.dynamic_loss_scale = dynamic_loss_scale
        self.cur_iter = 0
        self.cur_scale = static_loss_scale
        if dynamic_loss_scale:
            options = {**_DYNAMIC, **arguments}
            self.cur_scale = options["init_scale"]
            self.scale_factor = options["scale_factor"]
            self.scale_window = options["scale_window"]
            self.last_overflow_iter = -1
        self.fp16_groups: list[list[Tensor]] = []  # parameters of the model
        self.fp32_groups: list[list[Tensor]] = []  # their masters
        for group in init_optimizer.param_groups:
            self.fp16_groups.append(list(group["params"]))
            self.fp32_groups.append([param.detach().to(torch.float32, copy=True) for param in group["params"]])
            group["params"] = self.fp32_groups[-1]

    def zero_grad(self, set_grads_to_None: bool = True) -> None:
        """Clear the gradients of the model's parameters."""
        for param in (param for group in self.fp16_groups for param in group):
            if set_grads_to_None:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss in float32, times the loss scale."""
        (loss.float() * self.cur_scale).backward()

    def step(self, closure: None = None) -> None:
        """Perform one optimization step, unless a gradient overflowed; takes no closure."""
        if closure is not None:
            raise ValueError("FP16_Optimizer.step takes no closure: gradients come from FP16_Optimizer.backward")
        gradients = [[param.grad for param in group] for group in self.fp16_groups]
        norms = [l2norm([gradient for gradient in group if gradient is not None])[0] for group in gradients]
        overflow = not torch.cat([norm.to(norms[0].device) for norm in norms]).isfinite().all()
        if not overflow:
            self.optimizer.step(grads=gradients, output_params=self.fp16_groups, scale=self.cur_scale, grad_norms=norms)
        self._update_scale(overflow)

    def _update_scale(self, skip: bool) -> None:
        if skip and self.verbose:
            logger.info("gradients overflowed in iteration %d with a loss scale of %s", self.cur_iter, self.cur_scale)
        if self.dynamic_loss_scale:
            adapt_scale(self, skip)
        else:
            self.cur_iter += 1

    state = delegated("optimizer", "state")
    # The groups hold the masters.
    param_groups = delegated("optimizer", "param_groups")

    def state_dict(self) -> dict[str, Any]:
        """Return loss scale, masters, and the wrapped optimizer's state."""
        return {
            **{name: getattr(self, name) for name in _saved(self.dynamic_loss_scale)},
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_groups": self.fp32_groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; the model loads its parameters itself."""
        shapes = [[master.shape for master in group] for group in self.fp32_groups]
        saved = [[master.shape for master in group] for group in state_dict["fp32_groups"]]
        if shapes != saved:
            raise ValueError(f"state_dict['fp32_groups'] has tensors of shapes {saved}; {shapes} are expected")
        scaling = {name: state_dict[name] for name in _saved(state_dict["dynamic_loss_scale"])}
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        vars(self).update(scaling)
        for masters, values in zip(self.fp32_groups, state_dict["fp32_groups"], strict=True):
            for master, value in zip(masters, values, strict=True):
                master.copy_(value)
