"""The kernels of a batch norm: passes over tensors that these take, without autograd.

What sizes and flags decide is asked once per pass, of a launch rule, whose answers are kept.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _library
from .._device import DeviceFacts, empty_on, facts, launch_rule
from .._partial_sums import partial_sums
from . import config, reference
from .reference import BatchNormSpec, Channels, Exchange, GradientSums

kernels = _library.LazyModule(f"{__package__}.kernels")
kernels_whole = _library.LazyModule(f"{__package__}.kernels_whole")


def dense(tensor: Tensor, channel_dim: int) -> tuple[Tensor, bool]:
    """The tensor as the kernels take it, contiguous in one of the two layouts, and whether channels are last in it."""
    if tensor.is_contiguous():
        return tensor, channel_dim == -1
    if channel_dim == -1:
        return tensor.contiguous(), True
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor, True
    if tensor.stride(1) == 1:
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1), True
    return tensor.contiguous(), False


def like(x: Tensor, tensor: Tensor | None) -> Any:
    """`tensor` in the memory layout of the dense `x`, its own dtype kept."""
    if tensor is None or tensor.stride() == x.stride():
        return tensor
    return torch.empty_like(x, dtype=tensor.dtype).copy_(tensor)


def _contiguous(parameter: Tensor | None) -> Tensor | None:
    # Twice as quick as `contiguous`, which makes an object.
    return parameter if parameter is None or parameter.is_contiguous() else parameter.contiguous()


def _geometry(shape: tuple[int, ...], channel_dim: int, last: bool) -> config.Geometry:
    """How a dense tensor lies in memory."""
    images, channels = shape[0], shape[channel_dim]
    count = math.prod(shape) // channels
    if last or count == images:
        return config.Geometry(1, count, channels, True)
    return config.Geometry(images, count // images, channels, False)


# Forward --------------------------------------------------------------------------------------------------------------


def launch_forward(
    input: Tensor, z: Tensor | None, running: Channels, spec: BatchNormSpec, exchange: Exchange | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the mean and variance that it was normalised by; in training, over the ranks of `exchange`."""
    running_mean, running_var, weight, bias = running
    eps, momentum, training, relu, channel_dim = spec
    x, last = dense(input, channel_dim)
    device, dtype, strides = x.device, x.dtype, x.stride()
    launches = _forward_launches(x.shape, channel_dim, last, dtype, training, exchange is None, relu, device)
    empty = empty_on(device)
    if z is not None and z.stride() != strides:
        z = like(x, z)
    weight, bias = _contiguous(weight), _contiguous(bias)
    mean, variance = old_mean, old_variance = _contiguous(running_mean), _contiguous(running_var)
    y = empty(launches.shape, strides, dtype)
    if exchange is not None and training:
        partials, _ = partial_sums(launches.partials, device, False)
        launches.measure((x, partials))
        rank_stats = empty(launches.rank_stats, (1,), torch.float32)
        launches.statistics((partials, rank_stats, *[None] * 6), (0.0, 0.0))
        mean, variance = launch_combine(exchange.gather(rank_stats), running_mean, running_var, momentum)
    elif training:
        mean, variance = empty(launches.channels, (1,), torch.float32), empty(launches.channels, (1,), torch.float32)
        if launches.whole is not None:
            tensors = (x, z, weight, bias, old_mean, old_variance, mean, variance, y)
            launches.whole(tensors, (eps, momentum))
        else:
            partials, _ = partial_sums(launches.partials, device, False)
            launches.measure((x, partials))
            launches.statistics((partials, mean, variance, old_mean, old_variance, None, None, None), (momentum, eps))
        if old_mean is not running_mean:
            running_mean.copy_(old_mean)
        if old_variance is not running_var:
            running_var.copy_(old_variance)
    if launches.apply is not None:
        launches.apply((x, z, weight, bias, mean, variance, y), (eps,))
    return y, mean, variance  # type: ignore[return-value]


class ForwardLaunches(NamedTuple):
    """The kernels of a forward pass, which lack their tensors: `whole` alone, or the others, in this order."""

    shape: tuple[int, ...]
    channels: tuple[int]
    rank_stats: tuple[int]
    partials: int = 0  # elements of memory for the statistics of parts
    whole: Any = None
    measure: Any = None
    statistics: Any = None  # of the whole, or of a rank
    apply: Any = None


@launch_rule
def _forward_launches(
    shape: Any, channel_dim: int, last: bool, dtype: Any, training: bool, alone: bool, relu: bool, device: torch.device
) -> ForwardLaunches:
    geometry = _geometry(shape, channel_dim, last)
    channels = geometry.channels
    results = (tuple(shape), (channels,), (2 * channels + 1,))
    if training and alone and config.held_whole(math.prod(shape), channels, geometry.last):
        grid, sizes, constants = config.whole_tiling(geometry)
        whole = kernels_whole.batch_norm_whole.prepare(grid, sizes, RELU=relu, **constants)
        return ForwardLaunches(*results, whole=whole)
    here, itemsize = facts(device), dtype.itemsize
    apply = _apply_launch(geometry, itemsize, relu, here)
    if not training:
        return ForwardLaunches(*results, apply=apply)
    measure, parts, pitch = _measure_launch(geometry, itemsize, here)
    statistics = _statistics_launch(parts, channels, pitch)
    return ForwardLaunches(*results, parts * pitch, None, measure, statistics, apply)


def launch_statistics(input: Tensor, spec: BatchNormSpec, running: Channels, scaled: bool) -> tuple[Tensor, ...]:
    """Mean and biased variance of every channel of one process, towards which running statistics move.

    Where `scaled`, also [2, C]: what an input is to be multiplied by, and what is added then.
    """
    return _combine(*_measure(input, spec.channel_dim), running, spec.momentum, spec.eps, scaled)


def launch_combine(
    all_ranks: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """The same of several processes, from their rank statistics, [P, 2C + 1]."""
    ranks, pitch = all_ranks.shape
    running = Channels(running_mean, running_var, None, None)
    return _combine(all_ranks, ranks, pitch // 2, pitch, running, momentum)  # type: ignore[return-value]


def launch_rank_statistics(input: Tensor, channel_dim: int) -> Tensor:
    """[2C + 1]: means, sums of squared deviations and number of values per channel."""
    partials, parts, channels, pitch = _measure(input, channel_dim)
    rank_stats = torch.empty(2 * channels + 1, dtype=torch.float32, device=input.device)
    _statistics_launch(parts, channels, pitch)((partials, rank_stats, *[None] * 6), (0.0, 0.0))
    return rank_stats


def _measure(input: Tensor, channel_dim: int) -> tuple[Tensor, int, int, int]:
    """Statistics of parts of an input: `partials`, how many parts, the channels, and how far parts lie apart."""
    x, last = dense(input, channel_dim)
    geometry, device = _geometry(x.shape, channel_dim, last), x.device
    launch, parts, pitch = _measure_launch(geometry, x.dtype.itemsize, facts(device))
    partials, _ = partial_sums(parts * pitch, device, tickets=False)
    launch((x, partials))
    return partials, parts, geometry.channels, pitch


@launch_rule
def _measure_launch(geometry: config.Geometry, itemsize: int, device: DeviceFacts) -> tuple[Any, int, int]:
    """The kernel that measures, the parts it makes, and how far these lie apart."""
    pace = config.pace(*geometry, False, itemsize, device)
    tiles = config.tiling(geometry, pace.elements)
    programs = config.measure_programs(tiles.units, tiles.channel_blocks, device.multiprocessors, pace)
    pitch = config.pitch(geometry.channels)
    launch = kernels.batch_norm_measure.prepare(
        (programs * tiles.channel_blocks,),
        (*tiles.sizes, programs, pitch),
        **tiles.constants,
        UNROLL=pace.unroll,
        num_warps=pace.num_warps,
    )
    return launch, programs, pitch


def _combine(
    partials: Tensor,
    parts: int,
    channels: int,
    pitch: int,
    running: Channels,
    momentum: float,
    eps: float = 0.0,
    scaled: bool = False,
) -> tuple[Tensor, ...]:
    """Mean and biased variance of a whole from the statistics of its parts, towards which running ones move."""
    empty, shape = empty_on(partials.device), (channels,)
    mean, variance = empty(shape, (1,), torch.float32), empty(shape, (1,), torch.float32)
    running_mean, running_var, weight, bias = running
    old_mean, old_variance = _contiguous(running_mean), _contiguous(running_var)
    scale_shift = mean.new_empty(2, channels) if scaled else None
    parameters = (_contiguous(weight), _contiguous(bias), scale_shift)
    tensors = (partials, mean, variance, old_mean, old_variance, *parameters)
    _statistics_launch(parts, channels, pitch)(tensors, (momentum, eps))
    if old_mean is not running_mean:
        running_mean.copy_(old_mean)  # type: ignore[union-attr, arg-type]
    if old_variance is not running_var:
        running_var.copy_(old_variance)  # type: ignore[union-attr, arg-type]
    return (mean, variance) if scale_shift is None else (mean, variance, scale_shift)


@launch_rule
def _statistics_launch(parts: int, channels: int, pitch: int) -> Any:
    part_block, channel_block = config.finish_block(parts)
    return kernels.batch_norm_statistics.prepare(
        (-(-channels // channel_block),),
        (parts, channels, pitch),
        P_BLOCK=part_block,
        C_BLOCK=channel_block,
        num_warps=config.FINISH_WARPS,
    )


def launch_normalise(input: Tensor, z: Tensor | None, channels: Channels, spec: BatchNormSpec) -> Tensor:
    """The output, given mean and variance of every channel."""
    return launch_forward(input, z, channels, reference.evaluating(spec))[0]


@launch_rule
def _apply_launch(geometry: config.Geometry, itemsize: int, relu: bool, device: DeviceFacts) -> Any:
    chosen = config.apply_config(*geometry, False, itemsize, device)
    tiles = config.tiling(geometry, chosen.elements)
    return kernels.batch_norm_apply.prepare(
        (tiles.units * tiles.channel_blocks,),
        tiles.sizes,
        RELU=relu,
        **tiles.constants,
        num_warps=chosen.num_warps,
    )


# Backward -------------------------------------------------------------------------------------------------------------


def launch_backward(
    dy: Tensor,
    input: Tensor,
    output: Tensor | None,
    channels: Channels,
    spec: BatchNormSpec,
    exchange: Exchange | None,
    wants_input: bool,
    wants_z: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Gradients of input and addend (None where they are not wanted), weight and bias."""
    eps, _, training, relu, channel_dim = spec
    x, last = dense(input, channel_dim)
    device, dtype, strides = x.device, x.dtype, x.stride()
    if dy.stride() != strides:
        dy = like(x, dy)
    if output is not None and output.stride() != strides:
        output = like(x, output)
    dy_dtype, write_dz, alone = dy.dtype, wants_z and relu, exchange is None
    types, flags = (dtype, dy_dtype), (training, wants_input, alone, relu, write_dz)
    launches = _backward_launches(x.shape, channel_dim, last, types, flags, device)
    parameters = _parameters(channels)
    empty, shape = empty_on(device), launches.shape
    sum_dy, sum_dy_xhat = empty(launches.channels, (1,), torch.float32), empty(launches.channels, (1,), torch.float32)
    dx = empty(shape, strides, dtype) if wants_input else None
    dz = empty(shape, strides, dy_dtype) if write_dz else None
    if launches.whole is not None:
        launches.whole((x, dy, output, *parameters, sum_dy, sum_dy_xhat, dx, dz), (eps,))
        return dx, dy if wants_z and not relu else dz, sum_dy_xhat, sum_dy
    partials, _ = partial_sums(launches.partials, device, False)
    launches.measure((x, dy, output, *parameters, dz, partials), (eps,))
    rank_stats = None if alone else empty(launches.rank_stats, (1,), torch.float32)
    launches.sums((partials, sum_dy, sum_dy_xhat, rank_stats), (launches.values,))
    if dz is not None:  # the mask was applied: no need to ask the output again
        dy, output = dz, None
    sums: tuple[Tensor | None, ...] = (sum_dy, sum_dy_xhat)
    if exchange is not None:
        sum_dy, sum_dy_xhat = reference.over_ranks(exchange, rank_stats, sum_dy, sum_dy_xhat, wants_input)  # type: ignore[arg-type]
        sums = (rank_stats, None)
    if wants_input:
        launches.apply((x, dy, output, *parameters, *sums, dx), (eps, 1 / launches.values))
    return dx, dy if wants_z else None, sum_dy_xhat, sum_dy


class BackwardLaunches(NamedTuple):
    """The kernels of a backward pass, which lack their tensors: `whole` alone, or the others, in this order."""

    shape: tuple[int, ...]
    channels: tuple[int]
    rank_stats: tuple[int]
    values: float  # of a channel
    partials: int = 0  # elements of memory for the sums of parts
    whole: Any = None
    measure: Any = None
    sums: Any = None
    apply: Any = None


@launch_rule
def _backward_launches(
    shape: Any,
    channel_dim: int,
    last: bool,
    types: tuple[torch.dtype, torch.dtype],
    flags: tuple[bool, ...],
    device: torch.device,
) -> BackwardLaunches:
    (dtype, dy_dtype), (training, wants_input, alone, relu, write_dz) = types, flags
    geometry = _geometry(shape, channel_dim, last)
    channels, count = geometry.channels, float(geometry.images * geometry.positions)
    results = (tuple(shape), (channels,), (2 * channels + 1,), count)
    if training and wants_input and alone and config.held_whole(math.prod(shape), channels, geometry.last):
        grid, sizes, constants = config.whole_tiling(geometry)
        whole = kernels_whole.batch_norm_whole_backward.prepare(grid, sizes, RELU=relu, **constants)
        return BackwardLaunches(*results, whole=whole)
    here = facts(device)
    pace = config.pace(*geometry, True, dy_dtype.itemsize, here)
    tiles = config.tiling(geometry, pace.elements)
    programs = config.measure_programs(tiles.units, tiles.channel_blocks, here.multiprocessors, pace)
    measure = kernels.batch_norm_measure_backward.prepare(
        (programs * tiles.channel_blocks,),
        (*tiles.sizes, programs),
        RELU=relu,
        **tiles.constants,
        UNROLL=pace.unroll,
        num_warps=pace.num_warps,
    )
    part_block, channel_block = config.finish_block(programs)
    sums = kernels.batch_norm_sums.prepare(
        (-(-channels // channel_block),),
        (programs, channels),
        P_BLOCK=part_block,
        C_BLOCK=channel_block,
        num_warps=config.FINISH_WARPS,
    )
    apply = _input_gradient_launch(geometry, dtype.itemsize, relu and not write_dz, training, here)
    return BackwardLaunches(*results, programs * 2 * channels, None, measure, sums, apply)


def launch_input_gradient(
    dy: Tensor, input: Tensor, output: Tensor | None, channels: Channels, sums: GradientSums, spec: BatchNormSpec
) -> Tensor:
    """The input's gradient."""
    x, last = dense(input, spec.channel_dim)
    parameters, output = _parameters(channels), like(x, output)
    geometry, dx = _geometry(x.shape, spec.channel_dim, last), torch.empty_like(x)
    launch = _input_gradient_launch(geometry, x.dtype.itemsize, spec.relu, spec.training, facts(x.device))
    sum_dy, sum_dy_xhat = sums.sum_dy.contiguous(), _contiguous(sums.sum_dy_xhat)
    launch((x, like(x, dy), output, *parameters, sum_dy, sum_dy_xhat, dx), (spec.eps, sums.inverse_count))
    return dx


@launch_rule
def _input_gradient_launch(
    geometry: config.Geometry, itemsize: int, relu: bool, training: bool, device: DeviceFacts
) -> Any:
    chosen = config.apply_config(*geometry, True, itemsize, device)
    tiles = config.tiling(geometry, chosen.elements)
    return kernels.batch_norm_apply_backward.prepare(
        (tiles.units * tiles.channel_blocks,),
        tiles.sizes,
        RELU=relu,
        BATCH=training,
        **tiles.constants,
        num_warps=chosen.num_warps,
    )


def _parameters(channels: Channels) -> tuple[Tensor | None, ...]:
    """Weight, bias, mean and variance, in the order of the kernels."""
    mean, variance, weight, bias = channels
    return _contiguous(weight), _contiguous(bias), _contiguous(mean), _contiguous(variance)
