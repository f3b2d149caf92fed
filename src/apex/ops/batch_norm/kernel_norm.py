"""The stages of a norm by kernels, found once for every kind of norm and planned at first use."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .. import _device
from .launches import ApplyPlan, CombinePlan, InputGradientPlan, MeasurePlan, PacketPlan, Present, SumsPlan
from .layout import Kind, kind_of
from .spec import BatchNormSpec

Dtype = torch.dtype | None


def kernel_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: BatchNormSpec) -> KernelNorm:
    """The stages for a dense input."""
    return _kernel_norm(
        kind_of(x, spec),
        _dtype(weight),
        _dtype(bias),
        spec.eps,
        spec.relu,
        spec.training,
        x.device,
        _device.facts(x.device),
    )


class KernelNorm:
    """The stages of norms of one kind and specification.

    Inputs are dense, what else is of their size is laid out like them, and all that is per channel contiguous.
    """

    def __init__(
        self,
        kind: Kind,
        present: Present,
        eps: float,
        relu: bool,
        training: bool,
        device: torch.device,
        multiprocessors: int,
    ) -> None:
        self.kind, self.geometry, self.present, self.eps = kind, kind.geometry, present, eps
        self.relu, self.training = relu, training
        self.device, self.multiprocessors = device, multiprocessors
        self.inverse_count = 1 / kind.geometry.values

    def statistics(
        self, x: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, momentum: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Mean and biased variance, towards which running statistics move by `momentum`."""
        plan = measure_plan(self, _dtype(running_mean), _dtype(running_var))
        return plan.run(self._stream(), x, running_mean, running_var, momentum)

    def packet(self, x: Tensor) -> Tensor:
        """Means, sums of squared deviations and number of values."""
        return _packet_plan(self).run(self._stream(), x)

    def apply(
        self,
        x: Tensor,
        z: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        """The output, given statistics."""
        plan = apply_plan(self, _dtype(z), mean.dtype, variance.dtype)
        return plan.run(self._stream(), x, z, mean, variance, weight, bias)

    def sums(
        self,
        dy: Tensor,
        x: Tensor,
        y: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        write_dz: bool,
        packet: bool,
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
        """What ReLU lets through (where it is to be written), its sums, and these as a packet (likewise)."""
        dtypes = (dy.dtype, _dtype(y), mean.dtype, variance.dtype)
        plan = sums_plan(self, write_dz, packet, *dtypes)
        return plan.run(self._stream(), dy, x, y, mean, variance, weight, bias)

    def input_gradient(
        self,
        dy: Tensor,
        x: Tensor,
        y: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        plain: Tensor,
        along: Tensor | None,
        inverse_count: float | None,
        let_through: bool = False,
    ) -> Tensor:
        """The input's gradient, given the sums over everything that was normalised together.

        `plain` may be a packet: then `along` and `inverse_count` are None. `let_through` says that ReLU did so with
        `dy` already.
        """
        dtypes = (dy.dtype, _dtype(y), mean.dtype, variance.dtype)
        plan = input_gradient_plan(self, self.relu and not let_through, inverse_count, *dtypes)
        return plan.run(self._stream(), dy, x, y, mean, variance, weight, bias, plain, along)

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
        exchange: Callable[[Tensor], object] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
        """Gradients of input, addend (None if it is not wanted), bias and weight, and what was exchanged.

        `exchange` makes a packet the sum of those of several processes, in place.
        """
        given = (mean, variance, weight, bias)
        kept, plain, along, packet = self.sums(dy, x, y, *given, wants_z and self.relu, exchange is not None)
        sums: tuple[Tensor, Tensor | None, float | None] = (plain, along, self.inverse_count)
        if exchange is not None and packet is not None:
            exchange(packet)
            sums = (packet, None, None)
        if kept is None:
            dx = self.input_gradient(dy, x, y, *given, *sums)
        else:  # what ReLU let through is there: no need to ask the output again
            dx = self.input_gradient(kept, x, None, *given, *sums, let_through=True)
        return dx, (kept if self.relu else dy) if wants_z else None, plain, along, packet

    def _stream(self) -> int | None:
        return _device.stream_here(self.device.index)


def combine(
    parts: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, momentum: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of a whole from packets, towards which running statistics move by `momentum`."""
    device, dtypes = parts.device, (_dtype(running_mean), _dtype(running_var))
    plan = _combine_plan(parts.shape[0], parts.shape[1] // 2, *dtypes, device)
    return plan.run(_device.stream_here(device.index), parts, running_mean, running_var, momentum)


def clear_plans() -> None:
    """Forgets every plan, after a change of launch rules."""
    for cache in (_kernel_norm, _combine_plan):
        cache.cache_clear()


# Dtypes are part of the keys because a bound launch is for one set of them; facts because launch rules ask them.
@functools.lru_cache(maxsize=4096)
def _kernel_norm(kind, weight, bias, eps, relu, training, device, facts):
    return KernelNorm(kind, Present(weight, bias), eps, relu, training, device, facts.multiprocessors)


@functools.lru_cache(maxsize=4096)
def _combine_plan(parts, channels, mean, variance, device):
    return CombinePlan(parts, channels, 2 * channels + 1, mean is not None, device)


@functools.lru_cache(maxsize=4096)
def measure_plan(norm: KernelNorm, mean: Dtype, variance: Dtype) -> MeasurePlan:
    """For running statistics of these dtypes."""
    return MeasurePlan(norm.geometry, mean is not None, norm.device, norm.multiprocessors)


@functools.lru_cache(maxsize=4096)
def _packet_plan(norm):
    return PacketPlan(norm.geometry, norm.device, norm.multiprocessors)


@functools.lru_cache(maxsize=4096)
def apply_plan(norm: KernelNorm, z: Dtype, mean: Dtype, variance: Dtype) -> ApplyPlan:
    """For an addend and statistics of these dtypes."""
    return ApplyPlan(norm.kind, norm.present, z is not None, norm.eps, norm.relu, norm.device)


@functools.lru_cache(maxsize=4096)
def sums_plan(
    norm: KernelNorm, write_dz: bool, packet: bool, dy: torch.dtype, y: Dtype, mean: Dtype, variance: Dtype
) -> SumsPlan:
    """For tensors of these dtypes; `y` is the output, where kernels are given it."""
    mask = _mask(norm.relu, y)
    return SumsPlan(norm.kind, norm.present, mask, write_dz, packet, norm.eps, dy, norm.device, norm.multiprocessors)


@functools.lru_cache(maxsize=4096)
def input_gradient_plan(
    norm: KernelNorm,
    relu: bool,
    inverse_count: float | None,
    dy: torch.dtype,
    y: Dtype,
    mean: Dtype,
    variance: Dtype,
) -> InputGradientPlan:
    """The same; `relu` unless it let through what it does already."""
    mask = _mask(relu, y)
    return InputGradientPlan(norm.kind, norm.present, mask, norm.training, norm.eps, inverse_count, norm.device)


def _mask(relu: bool, y: torch.dtype | None) -> int:
    """How the kernels learn what ReLU let through: `y` is the dtype of the output, where they are given it."""
    return 0 if not relu else 1 if y is None else 2


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype
