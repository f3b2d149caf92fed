"""A batch norm over the inputs of the processes of a group: forward and backward, and the autograd node of group norms.

SyncBatchNorm, `apex.contrib.groupbn` and `apex.contrib.cudnn_gbn` are made of this.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops._library import once_differentiable
from ..ops.batch_norm import (
    BatchNormSpec,
    direct_norm,
    gradient_packet,
    joined_input_gradient,
    joined_statistics,
    laid_out_like,
    local_statistics,
    normalise,
    statistics_packet,
)
from ..ops.batch_norm.kernel_norm import KernelNorm, combine
from ._statistics import gathered, summed


def norm_of(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
    mean: Tensor | None = None,
    variance: Tensor | None = None,
) -> KernelNorm | None:
    """What takes the tensors as they are in all stages, with statistics that are given; None where nothing does."""
    return direct_norm(input, weight, bias, spec) if _are_contiguous(mean, variance) else None


def joined_forward(
    input: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    spec: BatchNormSpec,
    group: dist.ProcessGroup | None,
    norm: KernelNorm | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and mean and biased variance of the joined batch, towards which the running ones move.

    `norm` is that of `norm_of`, for the backward pass as well.
    """
    if group is None:
        mean, variance = local_statistics(input, spec, running_mean, running_var)
    else:
        packet = statistics_packet(input, spec) if norm is None else norm.packet(input)
        packets = gathered(packet, group)
        if norm is None or not _are_contiguous(running_mean, running_var):
            mean, variance = joined_statistics(packets, spec.momentum, running_mean, running_var)
        else:
            mean, variance = combine(packets, running_mean, running_var, spec.momentum)
    if norm is None:
        return normalise(input, z, mean, variance, weight, bias, spec), mean, variance
    z = None if z is None else laid_out_like(input, z)
    return norm.apply(input, z, mean, variance, weight, bias), mean, variance


def _are_contiguous(mean: Tensor | None, variance: Tensor | None) -> bool:
    return (mean is None or mean.is_contiguous()) and (variance is None or variance.is_contiguous())


class JoinedGradients(NamedTuple):
    """Gradients of input and addend; of bias and weight those of this process alone, and the packet of all."""

    input: Tensor
    z: Tensor | None
    bias: Tensor
    weight: Tensor
    packet: Tensor

    def group_means(self, processes: int) -> tuple[Tensor, Tensor]:
        """The gradients of weight and bias, averaged over the processes of the group."""
        bias, weight = (self.packet[:-1] / processes).chunk(2)
        return weight, bias


def joined_gradients(
    dy: Tensor,
    input: Tensor,
    output: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
    group: dist.ProcessGroup | None,
    norm: KernelNorm | None,
    wants_z: bool,
) -> JoinedGradients:
    """All gradients. `output` says what ReLU let through where something was added, and is None otherwise.

    `norm` is that of `norm_of`.
    """
    statistics = (mean, variance, weight, bias)
    if norm is not None:
        laid_out = norm.kind.laid_out
        dy, input, output = laid_out(dy), laid_out(input), None if output is None else laid_out(output)
        dx, dz, plain, along, told = norm.gradients(
            dy, input, output, *statistics, wants_z, lambda packet: summed(packet, group)
        )
        assert told is not None  # exchanged
        return JoinedGradients(dx, dz, plain, along, told)
    kept, plain, along, packet = gradient_packet(dy, input, output, *statistics, spec, wants_z)
    summed(packet, group)
    if wants_z and kept is not None:
        # What ReLU let through is there: no need to ask the output again.
        dy, output, spec = kept, None, spec._replace(relu=False)
    dx = joined_input_gradient(dy, input, output, *statistics, packet, spec)
    return JoinedGradients(dx, kept if wants_z else None, plain, along, packet)


class GroupBatchNormFunction(torch.autograd.Function):
    """Batch norm by the statistics of a group, plus `z`, then ReLU where `spec` says so; with mean and variance.

    Gradients of weight and bias are averages over the group, as upstream's compiled modules have them: with all that
    `DistributedDataParallel` averages, those of the joined batch.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        input: Tensor,
        z: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        spec: BatchNormSpec,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor]:
        norm = norm_of(input, weight, bias, spec)
        output, mean, variance = joined_forward(input, z, weight, bias, running_mean, running_var, spec, group, norm)
        ctx.mark_non_differentiable(mean, variance)
        # Without an addend what ReLU let through is computed again, so that the output need not be kept or read.
        kept = output if spec.relu and z is not None else None
        ctx.save_for_backward(input, kept, mean, variance, weight, bias)
        ctx.spec, ctx.group, ctx.norm, ctx.z_dtype = spec, group, norm, None if z is None else z.dtype
        return output, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: None):  # type: ignore[override]
        input, output, mean, variance, weight, bias = ctx.saved_tensors
        wants_z = ctx.needs_input_grad[1]
        found = joined_gradients(
            dy, input, output, mean, variance, weight, bias, ctx.spec, ctx.group, ctx.norm, wants_z
        )
        dweight, dbias = found.group_means(ctx.group.size())
        return (
            found.input,
            None if found.z is None else found.z.to(ctx.z_dtype),
            None if weight is None else dweight.to(weight.dtype),
            None if bias is None else dbias.to(bias.dtype),
            *(None,) * 4,
        )
