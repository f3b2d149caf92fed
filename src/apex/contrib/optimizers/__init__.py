"""Optimizers with sharded state (`Distributed...`), and upstream's first optimizers with FP16_Optimizer.

`step` of the first optimizers takes gradients, output tensors and a loss scale; FP16_Optimizer passes them.
"""

from __future__ import annotations

from ..._lazy import lazy_subpackages
from .fp16_optimizer import FP16_Optimizer
from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB
from .fused_sgd import FusedSGD

__all__ = [
    "DistributedFusedAdam",
    "DistributedFusedLAMB",
    "DistributedFusedMuon",
    "FP16_Optimizer",
    "FusedAdam",
    "FusedLAMB",
    "FusedSGD",
]

# Imported at first use, because they need torch.distributed.
_LATER = {
    "DistributedFusedAdam": "distributed_fused_adam",
    "DistributedFusedLAMB": "distributed_fused_lamb",
    "DistributedFusedMuon": "distributed_fused_muon",
}

__getattr__, __dir__ = lazy_subpackages(__name__, _LATER.values(), _LATER)
