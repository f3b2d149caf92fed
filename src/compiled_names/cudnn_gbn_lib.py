"""Upstream's compiled module of this name: batch norm of [N, C, H, W], without autograd; `minibatch_*` are filled.

Processes are those of `bn_group` consecutive ranks and exchange messages: `rank_id` and `peer_buffers` have no effect.
Gradients of `scale` and `bias` are averages over them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from apex.ops.batch_norm import BatchNormSpec, gradients
from apex.parallel._consecutive_groups import consecutive_group
from apex.parallel._joined_norm import joined_forward, joined_gradients, norm_of


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
    group = consecutive_group("bn_group", bn_group)
    spec = BatchNormSpec(epsilon, momentum)
    norm = norm_of(x, scale, bias, spec)
    output, mean, variance = joined_forward(x, None, scale, bias, running_mean, running_var, spec, group, norm)
    minibatch_mean.copy_(mean)
    minibatch_inv_var.copy_((variance + epsilon).rsqrt())
    return output


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
    group = consecutive_group("bn_group", bn_group)
    spec = BatchNormSpec(epsilon)
    variance = minibatch_inv_var.square().reciprocal() - epsilon
    tensors = (dy, x, None, minibatch_mean, variance, scale, None, spec)
    if group is None:
        dx, _, dscale, dbias = gradients(*tensors, False)
    else:
        found = joined_gradients(*tensors, group, norm_of(x, scale, None, spec, minibatch_mean, variance), False)
        dx, (dscale, dbias) = found.input, found.group_means(bn_group)
    return [dx, dscale.to(scale.dtype), dbias.to(scale.dtype)]
