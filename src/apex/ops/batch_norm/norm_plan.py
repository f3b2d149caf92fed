"""A norm over one input alone, by kernels: all that tensors of one kind decide."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .._device import stream_here
from .autograd import apply_node
from .kernel_norm import Dtype, KernelNorm, apply_plan, input_gradient_plan, kernel_norm, measure_plan, sums_plan
from .spec import BatchNormSpec, BatchStatistics


class NormPlan:
    """What is left to do for tensors that lie as kernels take them. A plan is for any momentum."""

    def __init__(self, norm: KernelNorm, spec: BatchNormSpec, z: Dtype, running: tuple[Dtype, Dtype]) -> None:
        self.spec, self.z_dtype = spec, z
        # Without an addend what ReLU let through is computed again, so that the output need not be kept or read.
        self.keeps_output = spec.relu and z is not None
        self._norm, self._index = norm, norm.device.index
        self._measure = measure_plan(norm, *running) if spec.training else None
        self._statistics = (torch.float32, torch.float32) if spec.training else running
        self._apply = apply_plan(norm, z, *self._statistics)
        self._gradients: dict[bool, GradientsPlan] = {}

    def run(
        self,
        input: Tensor,
        z: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        wanted: bool,
    ) -> tuple[Tensor, BatchStatistics | None]:
        """The output, and in training, where they are `wanted`, the statistics of the batch."""
        stream = stream_here(self._index)
        if self._measure is not None:
            mean, variance = self._measure.run(stream, input, running_mean, running_var, momentum)
        else:
            assert running_mean is not None  # checked
            assert running_var is not None
            mean, variance = running_mean, running_var
        output = self._apply.run(stream, input, z, mean, variance, weight, bias)
        if torch.is_grad_enabled():
            output = apply_node(input, z, weight, bias, self, (output, mean, variance))
        return output, BatchStatistics(mean, variance, False) if wanted and self._measure is not None else None

    def gradients(self, wants_z: bool) -> GradientsPlan:
        """The plan of the backward pass, made when it is first asked for."""
        plan = self._gradients.get(wants_z)
        if plan is None:
            plan = self._gradients[wants_z] = GradientsPlan(self._norm, self.keeps_output, self._statistics, wants_z)
        return plan


class GradientsPlan:
    """The backward pass of a norm over one input alone."""

    def __init__(self, norm: KernelNorm, given_output: bool, statistics: tuple[Dtype, Dtype], wants_z: bool) -> None:
        dy = norm.kind.dtype
        let_through = wants_z and norm.relu
        y = dy if given_output else None
        self._index, self._kind, self._wants_z = norm.device.index, norm.kind, wants_z
        self._sums = sums_plan(norm, let_through, False, dy, y, *statistics)
        relu, seen = (False, None) if let_through else (norm.relu, y)
        self._input = input_gradient_plan(norm, relu, norm.inverse_count, dy, seen, *statistics)

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
        """Gradients of input, addend (None if it is not wanted), weight and bias."""
        laid_out = self._kind.laid_out
        dy, x, y = laid_out(dy), laid_out(x), None if y is None else laid_out(y)
        stream = stream_here(self._index)
        kept, plain, along, _ = self._sums.run(stream, dy, x, y, mean, variance, weight, bias)
        if kept is None:
            dx = self._input.run(stream, dy, x, y, mean, variance, weight, bias, plain, along)
            return dx, dy if self._wants_z else None, along, plain
        # What ReLU let through is there: no need to ask the output again.
        return self._input.run(stream, kept, x, None, mean, variance, weight, bias, plain, along), kept, along, plain


def norm_plan(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    spec: BatchNormSpec,
) -> NormPlan:
    """The plan for a dense input, an addend laid out like it, and contiguous tensors per channel."""
    dtypes = [None if each is None else each.dtype for each in (z, running_mean, running_var)]
    return _norm_plan(kernel_norm(x, weight, bias, spec), spec._replace(momentum=0.0), *dtypes)


@functools.lru_cache(maxsize=4096)
def _norm_plan(norm: KernelNorm, spec: BatchNormSpec, z: Dtype, mean: Dtype, variance: Dtype) -> NormPlan:
    return NormPlan(norm, spec, z, (mean, variance))
