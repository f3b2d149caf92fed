"""Upstream's compiled module of this name: batch norm, addend and ReLU of images, without autograd.

Images are [N, H, W, C], or [N, C, H, W] in PyTorch's channels-last format as in ROCm's variant. Despite its name,
`running_inv_var` is the (unbiased) running variance; `minibatch_inv_var` is one over the batch's standard deviation.
Running and minibatch statistics are written in place. `bn_group` consecutive ranks share statistics and exchange them
by messages: pointers to each other's memory and arguments for kernel launches have no effect. Gradients of `scale` and
`bias` are averages over the group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apex.ops.batch_norm import BatchNormSpec, Channels, backward, forward, normalise
from apex.parallel._statistics import consecutive_exchange

_OCCUPANCY = 2
# Four sums, each for 256 blocks of 64 channels, twice, 4 bytes each.
_BYTES_PER_STEP = 4 * 256 * 64 * 2 * 4


def _spec(
    x: Tensor, scale: Tensor, momentum: float, epsilon: float, relu: bool, training: bool = True
) -> BatchNormSpec:
    if x.dim() != 4:
        raise ValueError(f"x has shape {list(x.shape)}; images, four dimensions, are needed")
    channels = scale.numel()
    torch_format = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    dimension = 1 if torch_format and x.shape[1] == channels else -1
    if x.shape[dimension] != channels:
        raise ValueError(f"x has shape {list(x.shape)}, which does not end with the {channels} channels of scale")
    return BatchNormSpec(epsilon, momentum, training, relu, dimension)


def _train(
    x, z, scale, bias, running_mean, running_var, mean_out, inverse_out, bn_group: int, spec: BatchNormSpec
) -> Tensor:
    exchange = consecutive_exchange("bn_group", bn_group)
    output, channels = forward(x, z, Channels(running_mean, running_var, scale, bias), spec, exchange)
    mean_out.copy_(channels.mean)
    inverse_out.copy_((channels.variance + spec.eps).rsqrt())
    return output


def _gradients(
    x, dy, output, scale, bias, mean, inverse, bn_group: int, spec: BatchNormSpec, has_z: bool
) -> tuple[Any, Any, Tensor, Tensor]:
    exchange = consecutive_exchange("bn_group", bn_group)
    channels = Channels(mean, inverse.square().reciprocal() - spec.eps, scale, bias)
    dx, dz, dscale, dbias = backward(dy, x, output, channels, spec, exchange, wants_z=has_z)
    return dx, dz, dscale.to(scale.dtype), dbias.to(bias.dtype)


def bn_fwd_nhwc(
    x, scale, bias, running_mean, running_inv_var, minibatch_mean, minibatch_inv_var, ret_cta, momentum, epsilon,
    fuse_relu, my_data, pair_data, pair_data2, pair_data3, bn_group, magic_tensor, occupancy, grid_dim_x, coop,
) -> Tensor:  # fmt: skip
    """Compute batch norm in training, then ReLU if `fuse_relu`."""
    spec = _spec(x, scale, momentum, epsilon, fuse_relu)
    running = (running_mean, running_inv_var)
    return _train(x, None, scale, bias, *running, minibatch_mean, minibatch_inv_var, bn_group, spec)


def bn_fwd_eval_nhwc(
    x, scale, bias, running_mean, running_inv_var, ret_cta, bn_group, momentum, epsilon, fuse_relu
) -> Tensor:
    """Compute batch norm by the running statistics, then ReLU if `fuse_relu`."""
    spec = _spec(x, scale, momentum, epsilon, fuse_relu, training=False)
    return normalise(x, None, Channels(running_mean, running_inv_var, scale, bias), spec)


def bn_bwd_nhwc(
    x, dy, scale, bias, running_mean, running_inv_var, minibatch_mean, minibatch_inv_var, ret_cta, momentum, epsilon,
    fuse_relu, my_data, pair_data, pair_data2, pair_data3, bn_group, magic_tensor, occupancy, grid_dim_x, coop,
) -> list[Tensor]:  # fmt: skip
    """Return [gradient of x, of scale, of bias]."""
    spec = _spec(x, scale, momentum, epsilon, fuse_relu)
    statistics = (minibatch_mean, minibatch_inv_var)
    dx, _, dscale, dbias = _gradients(x, dy, None, scale, bias, *statistics, bn_group, spec, False)
    return [dx, dscale, dbias]


def bn_addrelu_fwd_nhwc(
    x, z, scale, bias, running_mean, running_inv_var, minibatch_mean, minibatch_inv_var, bitmask, ret_cta, momentum,
    epsilon, my_data, pair_data, pair_data2, pair_data3, bn_group, magic_tensor, occupancy, grid_dim_x, coop,
) -> Tensor:  # fmt: skip
    """Compute batch norm in training, plus `z`, then ReLU; write ReLU's mask to `bitmask`, a bit per element."""
    spec = _spec(x, scale, momentum, epsilon, True)
    place = _mask_bytes(bitmask, x)
    running = (running_mean, running_inv_var)
    output = _train(x, z, scale, bias, *running, minibatch_mean, minibatch_inv_var, bn_group, spec)
    place.copy_(_pack(_channels_last(output, spec) > 0))
    return output


def bn_addrelu_fwd_eval_nhwc(
    x, z, scale, bias, running_mean, running_inv_var, ret_cta, bn_group, momentum, epsilon
) -> Tensor:
    """Compute batch norm by the running statistics, plus `z`, then ReLU."""
    spec = _spec(x, scale, momentum, epsilon, True, training=False)
    return normalise(x, z, Channels(running_mean, running_inv_var, scale, bias), spec)


def bn_addrelu_bwd_nhwc(
    x, dy, scale, bias, running_mean, running_inv_var, minibatch_mean, minibatch_inv_var, bitmask, ret_cta, momentum,
    epsilon, my_data, pair_data, pair_data2, pair_data3, bn_group, magic_tensor, occupancy, grid_dim_x, coop,
) -> list[Tensor]:  # fmt: skip
    """Return [gradient of x, of z, of scale, of bias]."""
    spec = _spec(x, scale, momentum, epsilon, True)
    flags = _unpack(_mask_bytes(bitmask, x), x.numel()).view(_channels_last(x, spec).shape)
    output = (flags if spec.channel_dim == -1 else flags.movedim(-1, 1)).to(x.dtype)
    statistics = (minibatch_mean, minibatch_inv_var)
    dx, dz, dscale, dbias = _gradients(x, dy, output, scale, bias, *statistics, bn_group, spec, True)
    return [dx, dz, dscale, dbias]


def _channels_last(tensor: Tensor, spec: BatchNormSpec) -> Tensor:
    return tensor if spec.channel_dim == -1 else tensor.movedim(1, -1)


def _mask_bytes(bitmask: Tensor, x: Tensor) -> Tensor:
    """Return the bytes of `bitmask` that hold a bit for every element of `x`."""
    needed = -(-x.numel() // 8)
    if not bitmask.is_contiguous() or bitmask.numel() * bitmask.element_size() < needed:
        raise ValueError(
            f"bitmask has {bitmask.numel() * bitmask.element_size()} bytes, {needed} contiguous are needed"
        )
    return bitmask.view(-1).view(torch.uint8)[:needed]


def _pack(flags: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(flags.reshape(-1).to(torch.uint8), (0, -flags.numel() % 8)).view(-1, 8)
    packed = padded[:, 0].clone()
    for bit in range(1, 8):
        packed |= padded[:, bit] << bit
    return packed


def _unpack(packed: Tensor, count: int) -> Tensor:
    return torch.stack([packed >> bit & 1 for bit in range(8)], 1).view(-1)[:count]


def bn_fwd_nhwc_occupancy() -> int:
    """Return the number of programs per multiprocessor; callers use at most two."""
    return _OCCUPANCY


bn_bwd_nhwc_occupancy = bn_addrelu_fwd_nhwc_occupancy = bn_addrelu_bwd_nhwc_occupancy = bn_fwd_nhwc_occupancy


def get_buffer_size(bn_sync_steps: int) -> int:
    """Return the bytes that a process shares with others for `bn_sync_steps` steps of an exchange."""
    return bn_sync_steps * _BYTES_PER_STEP


def get_data_ptr(data: Tensor) -> int:
    """Return the address of a tensor's memory."""
    return data.data_ptr()


def get_remote_data_ptr(handle: Tensor, offset: Tensor | int) -> int:
    """Return 0 as the address of another process's memory: processes exchange messages instead."""
    return 0


def close_remote_data(handle: Tensor) -> None:
    """Do nothing: `get_remote_data_ptr` opens nothing."""
