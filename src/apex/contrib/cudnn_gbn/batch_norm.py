"""GroupBatchNorm2d: batch norm of images with statistics over a group of processes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ...ops._checks import check_floats
from ...ops._host import HOST
from ...ops._library import cast_for_autocast
from ...ops.batch_norm import (
    BatchNormSpec,
    BatchStatistics,
    Channels,
    average_factor,
    batch_norm_with_statistics,
    check_values,
)
from ...parallel._statistics import compare_first, consecutive_exchange, consecutive_group


class GroupBatchNorm2d(_BatchNorm):
    """Batch norm of [N, C, H, W] in any memory format, with statistics over `group_size` consecutive ranks in training.

    All processes must construct the module. Gradients of its parameters are averages over the group. The arguments
    after `group_size` have the same meaning as in `torch.nn.BatchNorm2d`. Inside `torch.autocast` the input is cast to
    autocast's dtype. `minibatch_mean` and `minibatch_inv_var` are the last batch's mean and one over its standard
    deviation.
    """

    def __init__(
        self,
        num_features: int,
        group_size: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        consecutive_group("group_size", group_size)
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.group_size = group_size
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.group_id, self.group_rank = divmod(rank, group_size)
        self.fwd_peer_buffers = self.get_peer_buffers(num_features)
        self.bwd_peer_buffers = self.get_peer_buffers(num_features)
        self._batch: BatchStatistics | None = None

    def get_peer_buffers(self, num_features: int) -> list[int]:
        """Return a zero for each process of the group: no address, because the processes exchange messages."""
        return [0] * self.group_size

    def _before_any(self, value: float) -> Tensor:
        """Return a tensor [num_features] filled with `value`: the statistics before the first batch."""
        return torch.full((self.num_features,), value, dtype=torch.float32, device=HOST)

    @property
    def minibatch_mean(self) -> Tensor:
        """Return each channel's mean in the last training batch; zeros before the first one."""
        return self._before_any(0.0) if self._batch is None else self._batch.asked().mean

    @property
    def minibatch_inv_var(self) -> Tensor:
        """Return one over each channel's standard deviation in the last training batch; ones before the first one."""
        return self._before_any(1.0) if self._batch is None else self._batch.asked().inverse_deviation(self.eps)

    def _check_input_dim(self, input: Tensor) -> None:
        check_floats(input=input)
        if input.dim() != 4:
            raise ValueError(f"input has shape {list(input.shape)}; images, four dimensions, are needed")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        (input,) = cast_for_autocast(input)
        training = self.training or self.running_mean is None
        tracked = self.training and self.track_running_stats
        factor = average_factor(self.momentum, self.num_batches_tracked) if tracked else 0.0
        running = (self.running_mean, self.running_var) if tracked or not training else (None, None)
        spec = BatchNormSpec(self.eps, factor, training)
        exchange = consecutive_exchange("group_size", self.group_size) if self.training else None
        if exchange is None and training:
            check_values(input, input.shape[1])
        if exchange is not None and not torch.compiler.is_compiling():
            compare_first(self, exchange, input.shape[1], input)
        channels = Channels(*running, self.weight, self.bias)
        output, batch = batch_norm_with_statistics(input, None, channels, spec, exchange)
        if batch is not None:
            self._batch = batch
        if tracked and self.momentum is None and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return output
