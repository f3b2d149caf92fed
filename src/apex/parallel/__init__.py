"""Training on several devices: DistributedDataParallel, Reducer, LARC."""

from __future__ import annotations

from typing import Any

from .distributed import DistributedDataParallel, Reducer
from .LARC import LARC

__all__ = ["LARC", "DistributedDataParallel", "Reducer"]

# What upstream has here and this package has not yet. Clients that find it absent catch ModuleNotFoundError alone.
_ABSENT = frozenset(
    {
        "SyncBatchNorm",
        "convert_syncbn_model",
        "create_syncbn_process_group",
        "optimized_sync_batchnorm",
        "optimized_sync_batchnorm_kernel",
        "sync_batchnorm",
        "sync_batchnorm_kernel",
    }
)


def __getattr__(name: str) -> Any:
    if name in _ABSENT:
        raise ModuleNotFoundError(f"apex.parallel.{name} is not there yet")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
