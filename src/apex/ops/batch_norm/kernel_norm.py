"""The stages of a norm by kernels, found once for every kind of norm and planned at first use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _device
from .launches import ApplyPlan, CombinePlan, InputGradientPlan, MeasurePlan, PacketPlan, Present, SumsPlan
from .layout import Geometry, geometry_of
from .spec import BatchNormSpec


def kernel_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: BatchNormSpec) -> KernelNorm:
    """The stages for a dense input."""
    return _kernel_norm(
        geometry_of(x, spec),
        _dtype(weight),
        _dtype(bias),
        spec.eps,
        spec.relu,
        spec.training,
        x.dtype,
        x.device,
        _device.facts(x.device),
    )


class KernelNorm:
    """The stages of norms of one geometry, dtype and specification.

    Inputs are dense, what else is of their size is laid out like them, and all that is per channel contiguous.
    """

    def __init__(
        self,
        geometry: Geometry,
        present: Present,
        eps: float,
        relu: bool,
        training: bool,
        device: torch.device,
        multiprocessors: int,
    ) -> None:
        self.geometry, self.present, self.eps = geometry, present, eps
        self.relu, self.training = relu, training
        self.device, self.multiprocessors = device, multiprocessors
        self.inverse_count = 1 / geometry.values

    def statistics(
        self, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float | None
    ) -> tuple[Tensor, Tensor]:
        """Mean and biased variance; with a momentum, running statistics are updated."""
        plan = _measure_plan(self, momentum, _dtype(running_mean), _dtype(running_var))
        return plan.run(x, running_mean, running_var)

    def packet(self, x: Tensor) -> Tensor:
        """Means, sums of squared deviations and number of values."""
        return _packet_plan(self).run(x)

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
        return _apply_plan(self, _dtype(z), mean.dtype, variance.dtype).run(x, z, mean, variance, weight, bias)

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
        return _sums_plan(self, write_dz, packet, *dtypes).run(dy, x, y, mean, variance, weight, bias)

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
        plan = _input_gradient_plan(self, self.relu and not let_through, inverse_count, *dtypes)
        return plan.run(dy, x, y, mean, variance, weight, bias, plain, along)

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


class NormPlan:
    """A norm over one input alone, by kernels: what is left to do for tensors of one kind."""

    def __init__(
        self,
        norm: KernelNorm,
        spec: BatchNormSpec,
        x: torch.dtype,
        z: torch.dtype | None,
        running: tuple[torch.dtype | None, torch.dtype | None],
    ) -> None:
        self.spec, self.z_dtype = spec, z
        # Without an addend what ReLU let through is computed again, so that the output need not be kept or read.
        self.keeps_output = spec.relu and z is not None
        self._norm, self._x_dtype = norm, x
        self._measure = None
        statistics: tuple[torch.dtype | None, ...] = running
        if spec.training:
            self._measure = _measure_plan(norm, None if running[0] is None else spec.momentum, *running)
            statistics = (torch.float32, torch.float32)
        self._statistics = statistics
        self._apply = _apply_plan(norm, z, *statistics)
        self._gradients: dict[bool, GradientsPlan] = {}

    def forward(
        self,
        x: Tensor,
        z: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Any,
        running_var: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output and the statistics it was normalised by; in training the running ones are updated."""
        mean, variance = running_mean, running_var
        if self._measure is not None:
            mean, variance = self._measure.run(x, running_mean, running_var)
        return self._apply.run(x, z, mean, variance, weight, bias), mean, variance

    def gradients(self, wants_z: bool) -> GradientsPlan:
        """The plan of the backward pass, made when it is first asked for."""
        plan = self._gradients.get(wants_z)
        if plan is None:
            plan = self._gradients[wants_z] = GradientsPlan(
                self._norm, self._x_dtype, self.keeps_output, self._statistics, wants_z
            )
        return plan


class GradientsPlan:
    """The backward pass of a norm over one input alone."""

    def __init__(self, norm: KernelNorm, dy: torch.dtype, given_output: bool, statistics: Any, wants_z: bool) -> None:
        let_through = wants_z and norm.relu
        y = dy if given_output else None
        self._wants_z = wants_z
        self._sums = _sums_plan(norm, let_through, False, dy, y, *statistics)
        relu, seen = (False, None) if let_through else (norm.relu, y)
        self._input = _input_gradient_plan(norm, relu, norm.inverse_count, dy, seen, *statistics)

    def run(
        self,
        dy: Tensor,
        x: Tensor,
        y: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Gradients of input, addend (None if it is not wanted), weight and bias; `dy` is laid out as the input."""
        kept, plain, along, _ = self._sums.run(dy, x, y, mean, variance, weight, bias)
        if kept is None:
            dx = self._input.run(dy, x, y, mean, variance, weight, bias, plain, along)
            return dx, dy if self._wants_z else None, along, plain
        # What ReLU let through is there: no need to ask the output again.
        return self._input.run(kept, x, None, mean, variance, weight, bias, plain, along), kept, along, plain


def combine(
    parts: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, momentum: float | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of a whole from packets; with a momentum, running statistics are updated."""
    dtypes = (_dtype(running_mean), _dtype(running_var))
    plan = _combine_plan(parts.shape[0], parts.shape[1] // 2, momentum, *dtypes, parts.device)
    return plan.run(parts, running_mean, running_var)


def clear_plans() -> None:
    """Forgets every plan, after a change of launch rules."""
    for cache in (_kernel_norm, _combine_plan):
        cache.cache_clear()


# Dtypes are part of the keys because a bound launch is for one set of them; facts because launch rules ask them.
@functools.lru_cache(maxsize=4096)
def _kernel_norm(geometry, weight, bias, eps, relu, training, dtype, device, facts):
    return KernelNorm(geometry, Present(weight, bias), eps, relu, training, device, facts.multiprocessors)


@functools.lru_cache(maxsize=4096)
def _combine_plan(parts, channels, momentum, mean, variance, device):
    return CombinePlan(parts, channels, 2 * channels + 1, momentum, device)


@functools.lru_cache(maxsize=4096)
def _measure_plan(norm, momentum, mean, variance):
    return MeasurePlan(norm.geometry, momentum, norm.device, norm.multiprocessors)


@functools.lru_cache(maxsize=4096)
def _packet_plan(norm):
    return PacketPlan(norm.geometry, norm.device, norm.multiprocessors)


@functools.lru_cache(maxsize=4096)
def _apply_plan(norm, z, mean, variance):
    return ApplyPlan(norm.geometry, norm.present, z is not None, norm.eps, norm.relu, norm.device)


@functools.lru_cache(maxsize=4096)
def _sums_plan(norm, write_dz, packet, dy, y, mean, variance):
    mask = _mask(norm.relu, y)
    return SumsPlan(
        norm.geometry, norm.present, mask, write_dz, packet, norm.eps, dy.itemsize, norm.device, norm.multiprocessors
    )


@functools.lru_cache(maxsize=4096)
def _input_gradient_plan(norm, relu, inverse_count, dy, y, mean, variance):
    mask = _mask(relu, y)
    return InputGradientPlan(norm.geometry, norm.present, mask, norm.training, norm.eps, inverse_count, norm.device)


def _mask(relu: bool, y: torch.dtype | None) -> int:
    """How the kernels learn what ReLU let through: `y` is the dtype of the output, where they are given it."""
    return 0 if not relu else 1 if y is None else 2


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype
