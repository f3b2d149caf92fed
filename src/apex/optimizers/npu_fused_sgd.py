"""NpuFusedSGD: stochastic gradient descent on combined parameters and gradients."""

from __future__ import annotations

from ._npu_base import NpuFusedOptimizerBase
from .fused_sgd import FusedSGD


class NpuFusedSGD(NpuFusedOptimizerBase, FusedSGD):
    """SGD with the numbers of `torch.optim.SGD` and the arguments of `FusedSGD`; state dicts are interchangeable."""
