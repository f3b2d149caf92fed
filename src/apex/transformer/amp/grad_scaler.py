"""Loss scaling that agrees over all processes that hold a part of the model, or a shard of the optimizer's state."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from ..._distributed import collectives
from ...amp._checks import check_count, check_flags, checked_number, checked_scale
from ...ops._host import HOST, on_host
from .. import parallel_state
from .._groups.device import parameter_device


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a split model: an overflow in one process skips the step in all.

    What was found is added up on the device, over the model-parallel group and over the replicas, whose optimizer may
    have divided the gradients among them (ZeRO). Nobody waits for the device unless the optimizer wants to know. The
    arguments are PyTorch's without the device.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        checked_scale("init_scale", init_scale)
        checked_number("growth_factor", growth_factor, 1.0 + 2**-20, math.inf, "a number above 1")
        checked_number("backoff_factor", backoff_factor, 2.0**-126, 1.0 - 2**-20, "a number between 0 and 1")
        check_count("growth_interval", growth_interval)
        check_flags(enabled=enabled)
        scaling = (float(init_scale), float(growth_factor), float(backoff_factor), growth_interval)
        super().__init__(parameter_device().type, *scaling, bool(enabled))

    def _check_scale_growth_tracker(self, funcname: str) -> Any:
        """Makes the scale in a pipeline stage that has no loss, and so has called `scale` for nothing."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(parameter_device())  # type: ignore[attr-defined]
        return super()._check_scale_growth_tracker(funcname)  # type: ignore[misc]

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        """What overflowed in any process; `unscale_` calls this, and `step` for optimizers that unscale themselves."""
        if getattr(optimizer, "_custom_amp_unscale_grads", False):
            found = optimizer.unscale_grads(inv_scale, found_inf, allow_fp16)
        else:
            # PyTorch copies both to gradients in the host's memory (FSDP2 with offload) without waiting for the copy.
            gradients = (param.grad for group in optimizer.param_groups for param in group["params"])
            waits = any(gradient is not None and on_host(gradient) for gradient in gradients)
            flags = (inv_scale.to(HOST), found_inf.to(HOST)) if waits else (inv_scale, found_inf)
            found = super()._unscale_grads_(optimizer, *flags, allow_fp16)
        # One flag for however many devices gradients are on; a frozen stage of a pipeline has none and takes part.
        total = torch.zeros_like(found_inf)
        for flag in found.values():
            total += flag.to(total.device).reshape(total.shape)
        agreed(total)
        return {device: total.to(device) for device in found or [total.device]}

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """A step, unless gradients of any process overflowed.

        An optimizer that divides its gradients among processes (ZeRO), left to itself, would ask these and no others.
        """
        if not self._enabled or not getattr(optimizer, "_custom_amp_unscale_grads", False):
            return super().step(optimizer, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        elif state["stage"] is OptState.UNSCALED:  # by the optimizer, perhaps
            state["found_inf_per_device"] = {
                device: agreed(flag) for device, flag in state["found_inf_per_device"].items()
            }
        else:
            raise RuntimeError("step() has already been called since the last update().")
        (optimizer.found_inf,) = state["found_inf_per_device"].values()
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            optimizer.found_inf = None
            state["stage"] = OptState.STEPPED


def agreed(flag: torch.Tensor) -> torch.Tensor:
    """The sum of a flag over all processes that must take the same decision, in place."""
    if parallel_state.model_parallel_is_initialized():
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for group in (parallel_state.get_model_parallel_group(), replicas):
            if dist.get_world_size(group) > 1:
                collectives.all_reduce(flag, group, "agreeing on an overflow").wait()
    return flag
