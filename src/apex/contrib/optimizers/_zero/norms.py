"""Norms of gradients over all processes, and the factor of gradients in the next step (unscaling, clipping)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ...._distributed.collectives import all_reduce
from ...._failures import explained
from ....ops.multi_tensor import l2norm, max_norm
from .gradients import GradientSync
from .groups import Groups

_MEASURING = "measuring the norm of all gradients"


def norm_over_ranks(tensors: list[Tensor], groups: Groups, device: torch.device, order: float = 2.0) -> Tensor:
    """Return the norm, of order 2 or infinity, of the tensors of all processes that divide the state.

    It is a float32 scalar.
    """
    if tensors:
        local = (l2norm if order == 2.0 else max_norm)(tensors)[0].reshape(())
    else:
        local = torch.zeros((), dtype=torch.float32, device=device)
    if groups.ranks == 1:
        return local
    if order != 2.0:
        with explained(_MEASURING):
            dist.all_reduce(local, dist.ReduceOp.MAX, group=groups.distributed)
        return local
    square = local.square().reshape(1)
    all_reduce(square, groups.distributed, _MEASURING).wait()
    return square.sqrt().reshape(())


def any_nonfinite(norm: Tensor, groups: Groups) -> Tensor:
    """Return 1, float32 [1], if the norm of any process is not finite, else 0; all processes must call it."""
    flag = (~torch.isfinite(norm)).float().reshape(1)
    if groups.is_one:
        return flag
    all_reduce(flag, groups.process_group, "asking whether all gradients are finite").wait()
    return (flag > 0).float()


class Norms:
    """Norms of the gradients that a `GradientSync` has synchronized, and their factor in the next step."""

    def __init__(self, gradients: GradientSync, device: torch.device) -> None:
        self._gradients = gradients
        self._device = device
        # The factor of gradients in the next step, float32 [1]; None for 1.
        self.grad_scale: Tensor | None = None
        self._cached: tuple[int, float, Tensor] | None = None
        # The last flag of `found_inf` since gradients were cleared.
        self.overflowed: Tensor | None = None

    def reset(self) -> None:
        """Drop norm, factor and flag, because gradients were cleared."""
        self.grad_scale = None
        self._cached = None
        self.overflowed = None

    @property
    def scale(self) -> Tensor:
        """Return the factor of gradients in the next step, a scalar."""
        if self.grad_scale is None:
            self.grad_scale = torch.ones(1, dtype=torch.float32, device=self._device)
        return self.grad_scale.reshape(())

    @scale.setter
    def scale(self, value: Tensor) -> None:
        self.grad_scale = value.detach().to(self._device, torch.float32).reshape(1)

    def scale_by(self, factor: Tensor) -> None:
        """Multiply the factor of the next step by `factor`."""
        factor = factor.detach().to(self._device, torch.float32).reshape(1)
        self.grad_scale = factor if self.grad_scale is None else self.grad_scale * factor

    def norm(self, chosen: set[Tensor] | None = None, order: float = 2.0, force: bool = False) -> Tensor:
        """Return the norm of gradients after scaling and clipping, a float32 scalar."""
        norm = self._raw_norm(chosen, order, force)
        return norm if self.grad_scale is None else norm * self.grad_scale.reshape(())

    def _raw_norm(self, chosen: set[Tensor] | None, order: float, force: bool = False) -> Tensor:
        if order not in (2.0, torch.inf):
            raise ValueError(f"norm_type={order} is not supported; 2 and infinity are")
        version = self._gradients.version
        if chosen is None and not force and self._cached is not None and self._cached[:2] == (version, order):
            return self._cached[2]
        every = dict.fromkeys((self._gradients.groups, *(arena.groups for arena in self._gradients.arenas)))
        norms = [norm_over_ranks(self._local_tensors(chosen, own), own, self._device, order) for own in every]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)
        if chosen is None:
            self._cached = version, order, norm
        return norm

    def _local_tensors(self, chosen: set[Tensor] | None, groups: Groups | None = None) -> list[Tensor]:
        """Return this rank's part of the gradients of the `chosen` parameters in `groups`; None means all."""
        tensors: list[Tensor] = []
        for arena in self._gradients.arenas:
            if groups not in (None, arena.groups):
                continue
            if chosen is None and not self._gradients.groups.is_one:
                tensors.append(self._gradients.shards(arena))
                continue
            parts = zip(arena.parts, self._gradients.local(arena), strict=True)
            tensors += [gradient for part, gradient in parts if chosen is None or arena.params[part.param] in chosen]
        return tensors

    def local_square(self, chosen: set[Tensor] | None) -> Tensor:
        """Return the square of the 2-norm of this rank's part of the gradients before scaling, a float32 scalar."""
        tensors = self._local_tensors(chosen)
        if not tensors:
            return torch.zeros((), dtype=torch.float32, device=self._device)
        return l2norm(tensors)[0].reshape(()).square()

    @property
    def remembered(self) -> Tensor | None:
        """Return the 2-norm of all gradients before scaling; None if it is unknown or gradients have changed."""
        known = self._cached is not None and self._cached[:2] == (self._gradients.version, 2.0)
        return self._cached[2] if known and self._cached is not None else None

    @remembered.setter
    def remembered(self, value: Tensor | None) -> None:
        self._cached = None if value is None else (self._gradients.version, 2.0, value.detach().reshape(()))

    def found_inf(self) -> Tensor:
        """Return 1, float32 [1], if a gradient of any process, sent or not, is not finite, else 0."""
        tensors = self._gradients.tensors()
        norm = l2norm(tensors)[0] if tensors else torch.zeros(1, dtype=torch.float32, device=self._device)
        self.overflowed = any_nonfinite(norm, self._gradients.groups)
        return self.overflowed

    def unscale(self, optimizer: Any, inverse: Tensor | None, grad_scaler: Any) -> dict[torch.device, Tensor]:
        """Unscale gradients in the next step; `ZeroOptimizer.unscale_grads` describes arguments and result."""
        enabled = grad_scaler is not None and grad_scaler.is_enabled()
        state = grad_scaler._per_optimizer_states[id(optimizer)] if enabled else None
        if state is not None:
            if inverse is not None:
                raise ValueError("unscale_grads takes inv_scale or grad_scaler, not both")
            if state["stage"] is OptState.UNSCALED:
                raise RuntimeError("gradients have been unscaled since the last update of the scaler")
            if state["stage"] is OptState.STEPPED:
                raise RuntimeError("unscale_grads is called after step")
            inverse = grad_scaler._get_scale_async().double().reciprocal()
        if inverse is None:
            raise ValueError("unscale_grads needs inv_scale, or grad_scaler that is enabled")
        optimizer.grad_sync()
        flags = {self._device: self._flag(optimizer)}
        self.scale_by(inverse)
        if state is not None:
            state["found_inf_per_device"] = flags
            state["stage"] = OptState.UNSCALED
        return flags

    def _flag(self, optimizer: Any) -> Tensor:
        """Return 1, float32 [1], if a gradient of any process is not finite or their norm is too large, else 0."""
        if self.remembered is None:
            optimizer.grad_norm()  # a subclass may include more processes, and all must skip the same steps
        return (~torch.isfinite(self._raw_norm(None, 2.0))).float().reshape(1)

    def flag_of(self, optimizer: Any, grad_scaler: Any) -> Tensor | None:
        """Return the flag that turns the step off, or None without a scaler; unscale gradients if they are scaled."""
        if grad_scaler is None or not grad_scaler.is_enabled():
            return None
        state = grad_scaler._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED and not state["found_inf_per_device"]:
            if self.grad_scale is not None:
                raise RuntimeError(
                    "gradients were clipped or scaled after scaler.unscale_(optimizer), which finds none, because the "
                    "optimizer has taken them, and unscales nothing; call "
                    "optimizer.unscale_grads(grad_scaler=scaler) in its place"
                )
            state["stage"] = OptState.READY
        if state["stage"] is OptState.READY:
            return self.unscale(optimizer, None, grad_scaler)[self._device]
        state["found_inf_per_device"] = {self._device: self._flag(optimizer)}
        return state["found_inf_per_device"][self._device]
