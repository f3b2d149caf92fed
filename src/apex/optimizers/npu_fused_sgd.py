"""NpuFusedSGD: stochastic gradient descent on combined parameters and gradients."""

from __future__ import annotations

from ._combined import NpuFusedOptimizerBase
from .fused_sgd import FusedSGD


class NpuFusedSGD(NpuFusedOptimizerBase, FusedSGD):
    """The numbers of `torch.optim.SGD`, with which state dicts are interchangeable; the arguments of `FusedSGD`."""
