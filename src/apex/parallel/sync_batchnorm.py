"""The SyncBatchNorm that upstream has without its compiled modules: the same one here, with fewer arguments."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from . import optimized_sync_batchnorm


class SyncBatchNorm(optimized_sync_batchnorm.SyncBatchNorm):
    """Batch norm over the inputs of all processes of a group, without an addend or ReLU."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group, channel_last)

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input)
