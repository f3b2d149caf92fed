"""The autograd Function of upstream's Python-only SyncBatchNorm, which takes the joined statistics as arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import batch_norm
from ..ops._library import once_differentiable
from ._statistics import exchange_of


class SyncBatchnormFunction(torch.autograd.Function):
    """Batch norm by the mean and the biased variance of the inputs of all processes, which the caller has computed.

    They are passed as `running_mean` and `running_variance` (upstream's names). In the backward pass the processes of
    the group exchange their sums and numbers of values, so `world_size` is not used.
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
        spec, channels = (
            batch_norm.BatchNormSpec(eps),
            batch_norm.Channels(running_mean, running_variance, weight, bias),
        )
        output = batch_norm.normalise(input, None, channels, spec)
        batch_norm.save(ctx, input, None, output, channels, spec, exchange_of(process_group))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor):  # type: ignore[override]
        wants_input, *wants_parameters = ctx.needs_input_grad[:3]
        dx, _, dweight, dbias = batch_norm.saved_gradients(ctx, grad_output, (wants_input, False, *wants_parameters))
        return dx, dweight, dbias, *(None,) * 5
