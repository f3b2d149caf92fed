"""The autograd Function of upstream's SyncBatchNorm."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import batch_norm
from ..ops._library import once_differentiable
from ._statistics import exchange_of


class SyncBatchnormFunction(torch.autograd.Function):
    """Batch norm over the inputs of all processes of a group, plus `z`, then ReLU with `fuse_relu`.

    With `track_running_stats` (upstream's name) the batch's statistics are used, and running statistics, if given, move
    towards them by `momentum`. Otherwise the running statistics are used and nothing is exchanged. The gradients of
    weight and bias are this process's own.
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
        spec = batch_norm.BatchNormSpec(eps, momentum, track_running_stats, fuse_relu, -1 if channel_last else 1)
        running = batch_norm.Channels(running_mean, running_variance, weight, bias)
        batch_norm.check(input, running, z, spec)
        exchange = exchange_of(process_group) if track_running_stats else None
        output, channels = batch_norm.forward(input, z, running, spec, exchange)
        batch_norm.save(ctx, input, z, output, channels, spec, exchange)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor):  # type: ignore[override]
        return *batch_norm.saved_gradients(ctx, grad_output, ctx.needs_input_grad[:4]), *(None,) * 8
