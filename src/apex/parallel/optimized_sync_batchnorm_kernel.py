"""The autograd node of SyncBatchNorm."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ops.batch_norm import (
    BatchNormSpec,
    gradient_sums,
    input_gradient,
    joined_statistics,
    local_statistics,
    normalise,
)
from ._statistics import gathered_statistics, mean_sums


class SyncBatchnormFunction(torch.autograd.Function):
    """Batch norm over the inputs of all processes of a group, plus `z`, then ReLU with `fuse_relu`.

    With `track_running_stats`, upstream's word for it, statistics are those of the batch, and the running ones, where
    there are any, move towards them by `momentum`; otherwise the running ones are used and nothing is exchanged. The
    gradients of weight and bias are those of this process alone.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        input: Tensor,
        z: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_variance: Tensor | None,
        eps: float,
        track_running_stats: bool = True,
        momentum: float = 1.0,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> Tensor:
        spec = BatchNormSpec(eps, momentum, track_running_stats, fuse_relu, -1 if channel_last else 1)
        values = None
        if spec.training:
            count = input.numel() // max(1, input.shape[spec.channel_dim])
            parts = gathered_statistics(*local_statistics(input, spec), count, process_group)
            mean, variance = joined_statistics(parts, momentum, running_mean, running_variance)
            values = parts[:, -1].sum()
        else:
            assert running_mean is not None  # without statistics of the batch there must be others
            assert running_variance is not None
            mean, variance = running_mean, running_variance
        output = normalise(input, z, mean, variance, weight, bias, spec)
        # Without an addend what ReLU let through is computed again, so that the output need not be kept or read.
        kept = output if spec.relu and z is not None else None
        ctx.save_for_backward(input, kept, mean, variance, values, weight, bias)
        ctx.spec, ctx.process_group, ctx.z_dtype = spec, process_group, None if z is None else z.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor):  # type: ignore[override]
        input, output, mean, variance, values, weight, bias = ctx.saved_tensors
        spec: BatchNormSpec = ctx.spec
        wants_input, wants_z, wants_weight, wants_bias = ctx.needs_input_grad[:4]
        gradient, statistics = grad_output, (mean, variance, weight, bias)
        kept, plain, along = gradient_sums(gradient, input, output, *statistics, spec, wants_z)
        dx = None
        if wants_input:
            if wants_z and kept is not None:
                # What ReLU let through is there: no need to ask the output again.
                gradient, output, spec = kept, None, spec._replace(relu=False)
            sums = mean_sums(plain, along, values, ctx.process_group) if spec.training else (plain, along)
            dx = input_gradient(gradient, input, output, *statistics, *sums, 1.0, spec)
        return (
            dx,
            kept.to(ctx.z_dtype) if wants_z and kept is not None else None,
            along.to(weight.dtype) if wants_weight else None,
            plain.to(bias.dtype) if wants_bias else None,
            *(None,) * 8,
        )
