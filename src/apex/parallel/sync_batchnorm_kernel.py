"""The autograd node of upstream's SyncBatchNorm without compiled modules, which is given joined statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops._library import once_differentiable
from ..ops.batch_norm import BatchNormSpec, gradient_sums, normalise
from ._joined_norm import joined_gradients, norm_of
from ._statistics import connected


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
        ctx.spec, ctx.group = BatchNormSpec(eps), connected(process_group)
        ctx.save_for_backward(input, running_mean, running_variance, weight, bias)
        return normalise(input, None, running_mean, running_variance, weight, bias, ctx.spec)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor):  # type: ignore[override]
        input, mean, variance, weight, bias = ctx.saved_tensors
        tensors = (grad_output, input, None, mean, variance, weight, bias, ctx.spec)
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dx: Tensor | None
        if wants_input:
            norm = norm_of(input, weight, bias, ctx.spec, mean, variance)
            dx, _, dbias, dweight, _ = joined_gradients(*tensors, ctx.group, norm, False)
        else:
            dx, (_, dbias, dweight) = None, gradient_sums(*tensors, False)
        return (
            dx,
            dweight.to(weight.dtype) if wants_weight else None,
            dbias.to(bias.dtype) if wants_bias else None,
            *(None,) * 5,
        )
