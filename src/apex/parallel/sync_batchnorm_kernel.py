"""The autograd node of upstream's SyncBatchNorm without compiled modules, which is given joined statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ops.batch_norm import BatchNormSpec, gradient_sums, input_gradient, normalise
from ._statistics import process_count


class SyncBatchnormFunction(torch.autograd.Function):
    """Normalises by the mean and the biased variance of the inputs of all processes, which the caller has found.

    `running_mean` and `running_variance` are upstream's names for them. Backward, the processes of the group exchange
    their sums and how many values they have, so `world_size` is not asked.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor,
        running_variance: Tensor,
        eps: float,
        process_group: dist.ProcessGroup | None,
        world_size: int,
    ) -> Tensor:
        ctx.spec, ctx.process_group = BatchNormSpec(eps), process_group
        ctx.save_for_backward(input, running_mean, running_variance, weight, bias)
        return normalise(input, None, running_mean, running_variance, weight, bias, ctx.spec)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor):  # type: ignore[override]
        input, mean, variance, weight, bias = ctx.saved_tensors
        statistics = (mean, variance, weight, bias)
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        _, plain, along = gradient_sums(grad_output, input, None, *statistics, ctx.spec, False)
        dx = None
        if wants_input:
            count = plain.new_full((1,), input.numel() // max(1, input.shape[1]))
            sums = torch.cat((plain, along, count))
            if process_count(ctx.process_group):
                dist.all_reduce(sums, group=ctx.process_group)
            mean_plain, mean_along = (sums[:-1] / sums[-1:].clamp(min=1)).chunk(2)
            dx = input_gradient(grad_output, input, None, *statistics, mean_plain, mean_along, 1.0, ctx.spec)
        return (
            dx,
            along.to(weight.dtype) if wants_weight else None,
            plain.to(bias.dtype) if wants_bias else None,
            *(None,) * 5,
        )
