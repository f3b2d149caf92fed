"""A norm of one process in training whose channels are small: one launch forward and one backward, in place of six."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._device import launch_rule
from . import config
from .passes import _contiguous, _dense, _kernel_channels, _like, _mask
from .reference import BatchNormSpec, Channels

kernels = _library.LazyModule(f"{__package__}.kernels_whole")


def fits(input: Tensor, spec: BatchNormSpec) -> bool:
    """Whether one program can hold all values of a channel, in training."""
    if not spec.training:
        return False
    positions_contiguous = spec.channel_dim == 1 and input.dim() > 2 and input.is_contiguous()
    return config.held_whole(input.numel(), input.shape[spec.channel_dim], not positions_contiguous)


def forward(input: Tensor, z: Tensor | None, running: Channels, spec: BatchNormSpec) -> tuple[Tensor, Tensor, Tensor]:
    """The output, mean and biased variance of every channel; running statistics move towards these."""
    x, geometry = _dense(input, spec.channel_dim)
    mean = torch.empty(geometry.channels, dtype=torch.float32, device=x.device)
    y, variance = torch.empty_like(x), torch.empty_like(mean)
    weight, bias, *places = (
        _contiguous(each) for each in (running.weight, running.bias, running.mean, running.variance)
    )
    flags = (z is not None, weight is not None, bias is not None, running.mean is not None, spec.relu)
    launch = _forward_launch(geometry, *flags)
    launch((x, _like(x, z), weight, bias, *places, mean, variance, y), (spec.eps, spec.momentum))
    for before, after in zip((running.mean, running.variance), places, strict=True):
        if after is not before:
            before.copy_(after)
    return y, mean, variance


@launch_rule
def _forward_launch(geometry: config.Geometry, z: bool, weight: bool, bias: bool, running: bool, relu: bool) -> Any:
    grid, sizes, constants = config.whole_tiling(geometry)
    flags = {"HAS_Z": z, "HAS_WEIGHT": weight, "HAS_BIAS": bias, "RUNNING": running, "RELU": relu}
    return kernels.batch_norm_whole.prepare(grid, sizes, **flags, **constants)


def backward(
    dy: Tensor, input: Tensor, output: Tensor | None, channels: Channels, spec: BatchNormSpec, wants_z: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of input, addend (None unless it is wanted), weight and bias."""
    x, geometry = _dense(input, spec.channel_dim)
    dy, write_dz = _like(x, dy), wants_z and spec.relu
    sum_dy = torch.empty(geometry.channels, dtype=torch.float32, device=x.device)
    dx, dz, sum_dy_xhat = torch.empty_like(x), torch.empty_like(dy) if write_dz else None, torch.empty_like(sum_dy)
    flags = (channels.weight is not None, channels.bias is not None, _mask(spec, output), write_dz)
    launch = _backward_launch(geometry, *flags)
    launch((x, dy, _like(x, output), *_kernel_channels(channels), sum_dy, sum_dy_xhat, dx, dz), (spec.eps,))
    return dx, dy if wants_z and not spec.relu else dz, sum_dy_xhat, sum_dy


@launch_rule
def _backward_launch(geometry: config.Geometry, weight: bool, bias: bool, mask: int, write_dz: bool) -> Any:
    grid, sizes, constants = config.whole_tiling(geometry)
    flags = {"HAS_WEIGHT": weight, "HAS_BIAS": bias, "MASK": mask, "WRITE_DZ": write_dz}
    return kernels.batch_norm_whole_backward.prepare(grid, sizes, **flags, **constants)
