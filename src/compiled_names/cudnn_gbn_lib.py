"""Upstream's compiled module of this name: batch norm of [N, C, H, W], without autograd; it fills `minibatch_*`.

`bn_group` consecutive ranks share statistics and exchange them by messages: `rank_id` and `peer_buffers` have no
effect. Gradients of `scale` and `bias` are averages over the group.
"""

from __future__ import annotations

from torch import Tensor

from apex.ops import batch_norm
from apex.parallel._statistics import consecutive_exchange


def forward(
    x, scale, bias, running_mean, running_var, minibatch_mean, minibatch_inv_var, momentum, epsilon, bn_group, rank_id,
    peer_buffers,
) -> Tensor:  # fmt: skip
    """Return the output; update the running statistics, and write the batch's mean and one over its deviation."""
    exchange = consecutive_exchange("bn_group", bn_group)
    spec = batch_norm.BatchNormSpec(epsilon, momentum)
    running = batch_norm.Channels(running_mean, running_var, scale, bias)
    output, channels = batch_norm.forward(x, None, running, spec, exchange)
    minibatch_mean.copy_(channels.mean)
    minibatch_inv_var.copy_((channels.variance + epsilon).rsqrt())
    return output


def backward(x, dy, scale, minibatch_mean, minibatch_inv_var, epsilon, bn_group, rank_id, peer_buffers) -> list[Tensor]:
    """Return [gradient of x, of scale, of bias]."""
    exchange = consecutive_exchange("bn_group", bn_group)
    channels = batch_norm.Channels(minibatch_mean, minibatch_inv_var.square().reciprocal() - epsilon, scale)
    dx, _, dscale, dbias = batch_norm.backward(dy, x, None, channels, batch_norm.BatchNormSpec(epsilon), exchange)
    return [dx, dscale.to(scale.dtype), dbias.to(scale.dtype)]
