"""Upstream's compiled module of this name: batch norm of [N, C, H, W], without autograd; `minibatch_*` are filled.

`bn_group` is 1 so far, so `rank_id` and `peer_buffers` have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from apex.contrib.groupbn.batch_norm import check_group
from apex.ops.batch_norm import BatchNormSpec, gradients, local_statistics, normalise


def forward(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    minibatch_mean: Tensor,
    minibatch_inv_var: Tensor,
    momentum: float,
    epsilon: float,
    bn_group: int,
    rank_id: int,
    peer_buffers: Sequence[int],
) -> Tensor:
    """The output; moves the running statistics, and writes mean and one over the deviation of the batch."""
    check_group("bn_group", bn_group)
    spec = BatchNormSpec(epsilon, momentum)
    mean, variance = local_statistics(x, spec, running_mean, running_var)
    minibatch_mean.copy_(mean)
    minibatch_inv_var.copy_((variance + epsilon).rsqrt())
    return normalise(x, None, mean, variance, scale, bias, spec)


def backward(
    x: Tensor,
    dy: Tensor,
    scale: Tensor,
    minibatch_mean: Tensor,
    minibatch_inv_var: Tensor,
    epsilon: float,
    bn_group: int,
    rank_id: int,
    peer_buffers: Sequence[int],
) -> list[Tensor]:
    """[gradient of x, of scale, of bias]."""
    check_group("bn_group", bn_group)
    spec = BatchNormSpec(epsilon)
    variance = minibatch_inv_var.square().reciprocal() - epsilon
    dx, _, dscale, dbias = gradients(dy, x, None, minibatch_mean, variance, scale, None, spec, False)
    return [dx, dscale.to(scale.dtype), dbias.to(scale.dtype)]
