"""What a batch norm computes, beside its tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class BatchNormSpec(NamedTuple):
    """What is added to a variance, whether ReLU follows, and where the channels are.

    `training` normalises by the statistics of the batch, otherwise by the running ones. `momentum` is the weight of the
    batch in the running statistics. `channel_dim` is 1 for [N, C, ...] in any memory format, -1 for [N, ..., C].
    """

    eps: float = 1e-5
    momentum: float = 0.1
    training: bool = True
    relu: bool = False
    channel_dim: int = 1


class BatchStatistics(NamedTuple):
    """Mean of every channel of a batch and how far it spreads: the biased variance, or one over its root with eps."""

    mean: Tensor
    spread: Tensor
    inverted: bool

    def inverse_deviation(self, eps: float) -> Tensor:
        """One over the standard deviation, eps added to the variance."""
        return self.spread if self.inverted else (self.spread + eps).rsqrt()
