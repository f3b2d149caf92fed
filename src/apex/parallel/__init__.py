"""Training on several devices: DistributedDataParallel, Reducer, SyncBatchNorm, LARC."""

from __future__ import annotations

from torch.distributed import ReduceOp

from .distributed import DistributedDataParallel, Reducer
from .elastic import ElasticLoader
from .LARC import LARC
from .optimized_sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
from .replicas import ReplicaCheck, check_replicas

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ElasticLoader",
    "ReduceOp",
    "Reducer",
    "ReplicaCheck",
    "SyncBatchNorm",
    "check_replicas",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
