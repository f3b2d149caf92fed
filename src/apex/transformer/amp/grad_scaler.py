"""Loss scaling whose decisions agree on all processes that hold a part of the model or of the optimizer's state."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ..._distributed import collectives
from ..._distributed.shards import all_shard_groups, local, reduce_over
from ...amp._checks import check_count, check_flags, checked_number, checked_scale
from ...ops._host import HOST, on_host
from ...ops.multi_tensor import scale
from .. import parallel_state
from .._groups.device import parameter_device


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a split model: an overflow in one process skips the step in all.

    Overflow flags are summed on the device over the model-parallel group and over the replicas, because their optimizer
    may have divided the gradients among them (ZeRO). The host waits for the device only if the optimizer reads the
    flag. Gradients may be DTensors of any meshes, beside plain tensors; all processes that hold a shard agree. The
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
        """Create the scale in a pipeline stage without a loss, which never calls `scale`."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(parameter_device())  # type: ignore[attr-defined]
        return super()._check_scale_growth_tracker(funcname)  # type: ignore[misc]

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        """Unscale gradients and return the overflow flags summed over all processes.

        `unscale_` calls this method; so does `step` for optimizers that unscale themselves.
        """
        shard_groups: list[Any] = []
        if getattr(optimizer, "_custom_amp_unscale_grads", False):
            flags = optimizer.unscale_grads(inv_scale, found_inf, allow_fp16)
        else:
            # PyTorch copies both flags to host gradients (FSDP2 with offload) without waiting for the copy.
            gradients = [param.grad for group in optimizer.param_groups for param in group["params"]]
            gradients = [gradient for gradient in gradients if gradient is not None]
            waits = any(map(on_host, gradients))
            arguments = (inv_scale.to(HOST), found_inf.to(HOST)) if waits else (inv_scale, found_inf)
            shard_groups = all_shard_groups(gradients)
            if any(local(gradient) is not gradient for gradient in gradients):
                flags = _unscale_shards(gradients, *arguments, allow_fp16)
            else:
                flags = super()._unscale_grads_(optimizer, *arguments, allow_fp16)
        # One flag for all devices. A frozen pipeline stage has no gradients and still takes part in the sum.
        total = torch.zeros_like(found_inf)
        for flag in flags.values():
            total += flag.to(total.device).reshape(total.shape)
        reduce_over(total, shard_groups, maximum=True)
        sum_over_model(total)
        return {device: total.to(device) for device in flags or [total.device]}

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer's step unless gradients of any process overflowed.

        A ZeRO optimizer on its own would only ask the processes that share its state.
        """
        if not self._enabled or not getattr(optimizer, "_custom_amp_unscale_grads", False):
            return super().step(optimizer, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        elif state["stage"] is OptState.UNSCALED:  # possibly by the optimizer itself
            state["found_inf_per_device"] = {
                device: sum_over_model(flag) for device, flag in state["found_inf_per_device"].items()
            }
        else:
            raise RuntimeError("step() has already been called since the last update().")
        (optimizer.found_inf,) = state["found_inf_per_device"].values()
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            optimizer.found_inf = None
            state["stage"] = OptState.STEPPED


def _unscale_shards(
    gradients: list[Tensor], inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
) -> dict[torch.device, Tensor]:
    """Unscale this process's parts of gradients, plain tensors or DTensors, and return its overflow flags.

    PyTorch refuses DTensors of different meshes, and DTensors beside plain tensors.
    """
    parts: dict[torch.device, list[Tensor]] = {}
    for gradient in map(local, gradients):
        if gradient.dtype == torch.float16 and not allow_fp16:
            raise ValueError("Attempting to unscale FP16 gradients.")
        parts.setdefault(gradient.device, []).append(gradient)
    flags = {device: found_inf.to(device, copy=True) for device in parts}
    for device, tensors in parts.items():
        scale(tensors, tensors, inv_scale, overflow=flags[device])
    return flags


def sum_over_model(flag: torch.Tensor) -> torch.Tensor:
    """Sum a flag in place over all processes that must take the same decision, and return it."""
    if parallel_state.model_parallel_is_initialized():
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for group in (parallel_state.get_model_parallel_group(), replicas):
            if dist.get_world_size(group) > 1:
                collectives.all_reduce(flag, group, "agreeing on an overflow").wait()
    return flag
