"""Norms over the inputs of several processes by kernels: all that tensors of one kind decide, found by one lookup.

Processes tell each other packets; how is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._device import stream_here
from .._plans import Plans, kind
from .checks import check
from .kernel_norm import KernelNorm, combine
from .launches import ApplyPlan, InputGradientPlan, PacketPlan, SumsPlan
from .spec import BatchNormSpec
from .stages import direct_norm

# From the packet of this process to those of all, [P, 2C + 1]; and to their sum, in place.
Gather = Callable[[Tensor], Tensor]
AddUp = Callable[[Tensor], object]


class JoinedPlan:
    """A norm of training, of dense inputs of one kind. Gradients have the dtype of the input."""

    def __init__(self, norm: KernelNorm, spec: BatchNormSpec, z: torch.dtype | None) -> None:
        self.spec, self.z_dtype = spec, z
        # Without an addend what ReLU let through is computed again, so that the output need not be kept or read.
        self.keeps_output = norm.relu and z is not None
        self._norm = norm
        self._packet = PacketPlan(norm.geometry, norm.device, norm.multiprocessors)
        self._apply = ApplyPlan(norm.kind, norm.present, z is not None, norm.eps, norm.relu, norm.device)
        self._backward: dict[bool, tuple[SumsPlan, InputGradientPlan]] = {}

    def forward(
        self,
        x: Tensor,
        z: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        gather: Gather,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The output, and mean and biased variance of all inputs, towards which the running ones move."""
        stream = stream_here(self._norm.device.index)
        packets = gather(self._packet.run(stream, x))
        mean, variance = combine(packets, running_mean, running_var, momentum)
        return self._apply.run(stream, x, z, mean, variance, weight, bias), mean, variance

    def gradients(
        self,
        dy: Tensor,
        x: Tensor,
        y: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        wants_z: bool,
        add_up: AddUp,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Gradients of input, addend (None if it is not wanted), weight and bias, the last two of this process alone.

        `y` is the output where it was kept.
        """
        plans = self._backward.get(wants_z)
        if plans is None:
            plans = self._backward[wants_z] = self._plan_backward(wants_z)
        laid_out, stream = self._norm.kind.laid_out, stream_here(self._norm.device.index)
        dy, x, y = laid_out(dy), laid_out(x), None if y is None else laid_out(y)
        kept, plain, along, packet = plans[0].run(stream, dy, x, y, mean, variance, weight, bias)
        assert packet is not None  # the plan is one with a packet
        add_up(packet)
        if kept is None:
            dx = plans[1].run(stream, dy, x, y, mean, variance, weight, bias, packet, None)
            return dx, dy if wants_z else None, along, plain
        # What ReLU let through is there: no need to ask the output again.
        return plans[1].run(stream, kept, x, None, mean, variance, weight, bias, packet, None), kept, along, plain

    def _plan_backward(self, wants_z: bool) -> tuple[SumsPlan, InputGradientPlan]:
        norm = self._norm
        # How kernels learn what ReLU let through: from the output, or from the input again.
        mask = 0 if not norm.relu else 2 if self.keeps_output else 1
        write_dz = wants_z and norm.relu
        shared = (norm.kind, norm.present)
        sums = SumsPlan(*shared, mask, write_dz, True, norm.eps, norm.kind.dtype, norm.device, norm.multiprocessors)
        return sums, InputGradientPlan(*shared, 0 if write_dz else mask, True, norm.eps, None, norm.device)


_UNKNOWN: Any = object()
_plans: Plans[JoinedPlan | None] = Plans()


def joined_plan(
    input: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    spec: BatchNormSpec,
) -> JoinedPlan | None:
    """The plan for tensors that were checked; None where kernels do not take them as they are."""
    if not _library.may_plan(input):
        return None
    key = (
        *(input.shape, input.stride(), input.dtype, input.device),
        None if z is None else (z.shape, z.stride(), z.dtype, z.device),
        *(kind(weight), kind(bias), kind(running_mean), kind(running_var)),
        *(spec.eps, spec.relu, spec.channel_dim),
    )
    plan = _plans.get(key, _UNKNOWN)
    if plan is _UNKNOWN:
        check(input, running_mean, running_var, weight, bias, z, spec)
        plan = _plans.keep(key, _made(input, z, weight, bias, running_mean, running_var, spec))
    return plan


def _made(
    input: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    spec: BatchNormSpec,
) -> JoinedPlan | None:
    running = (running_mean, running_var)
    if (z is not None and z.stride() != input.stride()) or not all(
        each is None or each.is_contiguous() for each in running
    ):
        return None
    norm = direct_norm(input, weight, bias, spec)
    return None if norm is None else JoinedPlan(norm, spec, None if z is None else z.dtype)
