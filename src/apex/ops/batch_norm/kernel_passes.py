"""The kernels of a batch norm: passes over tensors that these take, without autograd.

What sizes and flags decide is asked once per pass, of a launch rule, whose answers are kept.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _library
from .._device import empty_on, facts, launch_rule
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
    mean, variance, weight, bias = running
    eps, momentum, training, relu, channel_dim = spec
    x, last = dense(input, channel_dim)
    device, dtype, strides = x.device, x.dtype, x.stride()
    launches = _forward_launches(x.shape, channel_dim, last, dtype, training, exchange is None, relu, device)
    if z is not None and z.stride() != strides:
        z = like(x, z)
    weight, bias = _contiguous(weight), _contiguous(bias)
    empty = empty_on(device)
    y = empty(launches.shape, strides, dtype)
    if launches.whole is not None:
        old_mean, old_variance = _contiguous(mean), _contiguous(variance)
        mean, variance = empty(launches.channels, (1,), torch.float32), empty(launches.channels, (1,), torch.float32)
        launches.whole((x, z, weight, bias, old_mean, old_variance, mean, variance, y), (eps, momentum))
        _write_back(running, old_mean, old_variance)
        return y, mean, variance
    if exchange is not None and training:
        rank_stats = _rank_statistics(x, launches.statistics)
        mean, variance = launch_combine(exchange.gather(rank_stats), mean, variance, momentum)
    elif training:
        parts = launches.statistics
        mean, variance, _ = _combine(_measure(x, parts), parts.finish, parts.channels, running, momentum)
    else:
        mean, variance = _contiguous(mean), _contiguous(variance)
    launches.apply((x, z, weight, bias, mean, variance, y), (eps,))
    return y, mean, variance


class StatisticsLaunches(NamedTuple):
    """The kernels that find the statistics of parts of an input and put them together, which lack their tensors."""

    measure: Any
    finish: Any
    partials: int  # elements of memory for the statistics of parts
    channels: int


class ForwardLaunches(NamedTuple):
    """The kernels of a forward pass, which lack their tensors: `whole` alone, or the others."""

    shape: tuple[int, ...]
    channels: tuple[int]
    whole: Any = None
    statistics: Any = None
    apply: Any = None


@launch_rule
def _forward_launches(
    shape: Any, channel_dim: int, last: bool, dtype: Any, training: bool, alone: bool, relu: bool, device: torch.device
) -> ForwardLaunches:
    geometry = _geometry(shape, channel_dim, last)
    results = (tuple(shape), (geometry.channels,))
    if training and alone and config.held_whole(math.prod(shape), geometry.channels, geometry.last):
        grid, sizes, constants = config.whole_tiling(geometry)
        return ForwardLaunches(*results, kernels_whole.batch_norm_whole.prepare(grid, sizes, RELU=relu, **constants))
    statistics = _statistics_launches(shape, channel_dim, last, dtype, device) if training else None
    apply = _elementwise(kernels.batch_norm_apply, geometry, False, dtype, device, RELU=relu)
    return ForwardLaunches(*results, None, statistics, apply)


@launch_rule
def _statistics_launches(
    shape: Any, channel_dim: int, last: bool, dtype: torch.dtype, device: torch.device
) -> StatisticsLaunches:
    geometry = _geometry(shape, channel_dim, last)
    channels, pitch = geometry.channels, config.pitch(geometry.channels)
    measure, parts = _summing(kernels.batch_norm_measure, geometry, False, dtype, device, pitch)
    finish = _finishing(kernels.batch_norm_statistics, parts, channels, pitch)
    return StatisticsLaunches(measure, finish, parts * pitch, channels)


def launch_statistics(input: Tensor, spec: BatchNormSpec, running: Channels, scaled: bool) -> tuple[Tensor, ...]:
    """Mean and biased variance of every channel of one process, towards which running statistics move.

    Where `scaled`, also [2, C]: what an input is to be multiplied by, and what is added then.
    """
    x, launches = _dense_and_launches(input, spec.channel_dim)
    rest = (launches.finish, launches.channels, running, spec.momentum, spec.eps, scaled)
    found = _combine(_measure(x, launches), *rest)
    return found if scaled else found[:2]


def launch_rank_statistics(input: Tensor, channel_dim: int) -> Tensor:
    """[2C + 1]: means, sums of squared deviations and number of values per channel."""
    return _rank_statistics(*_dense_and_launches(input, channel_dim))


def _dense_and_launches(input: Tensor, channel_dim: int) -> tuple[Tensor, StatisticsLaunches]:
    x, last = dense(input, channel_dim)
    return x, _statistics_launches(x.shape, channel_dim, last, x.dtype, x.device)


def launch_combine(
    all_ranks: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over several processes, from their rank statistics, [P, 2C + 1]."""
    ranks, pitch = all_ranks.shape
    finish = _finishing(kernels.batch_norm_statistics, ranks, pitch // 2, pitch)
    return _combine(all_ranks, finish, pitch // 2, Channels(running_mean, running_var), momentum)[:2]


def _rank_statistics(x: Tensor, launches: StatisticsLaunches) -> Tensor:
    partials = _measure(x, launches)
    rank_stats = empty_on(x.device)((2 * launches.channels + 1,), (1,), torch.float32)
    launches.finish((partials, rank_stats, *[None] * 6), (0.0, 0.0))
    return rank_stats


def _measure(x: Tensor, launches: StatisticsLaunches) -> Tensor:
    """The statistics of parts of a dense input."""
    partials, _ = partial_sums(launches.partials, x.device, tickets=False)
    launches.measure((x, partials))
    return partials


def _combine(
    partials: Tensor,
    finish: Any,
    channels: int,
    running: Channels,
    momentum: float,
    eps: float = 0.0,
    scaled: bool = False,
) -> Any:
    """Mean and biased variance of a whole from the statistics of its parts, and scale and shift, None if not wanted.

    Running statistics move towards them.
    """
    empty, shape = empty_on(partials.device), (channels,)
    mean, variance = empty(shape, (1,), torch.float32), empty(shape, (1,), torch.float32)
    scale_shift = mean.new_empty(2, channels) if scaled else None
    old_mean, old_variance = _contiguous(running.mean), _contiguous(running.variance)
    parameters = (_contiguous(running.weight), _contiguous(running.bias)) if scaled else (None, None)
    finish((partials, mean, variance, old_mean, old_variance, *parameters, scale_shift), (momentum, eps))
    _write_back(running, old_mean, old_variance)
    return mean, variance, scale_shift


def _write_back(running: Channels, mean: Tensor | None, variance: Tensor | None) -> None:
    """Changes running statistics that are not contiguous, of which a kernel changed a copy."""
    if mean is not running.mean:
        running.mean.copy_(mean)
    if variance is not running.variance:
        running.variance.copy_(variance)


def launch_normalise(input: Tensor, z: Tensor | None, channels: Channels, spec: BatchNormSpec) -> Tensor:
    """The output, given mean and variance of every channel."""
    return launch_forward(input, z, channels, reference.evaluating(spec))[0]


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
    measure, parts = _summing(kernels.batch_norm_measure_backward, geometry, True, dy_dtype, device, RELU=relu)
    sums = _finishing(kernels.batch_norm_sums, parts, channels)
    relu = relu and not write_dz
    apply = _elementwise(kernels.batch_norm_apply_backward, geometry, True, dtype, device, RELU=relu, BATCH=training)
    return BackwardLaunches(*results, parts * 2 * channels, None, measure, sums, apply)


def launch_input_gradient(
    dy: Tensor, input: Tensor, output: Tensor | None, channels: Channels, sums: GradientSums, spec: BatchNormSpec
) -> Tensor:
    """The input's gradient."""
    x, last = dense(input, spec.channel_dim)
    parameters, output = _parameters(channels), like(x, output)
    geometry, dx = _geometry(x.shape, spec.channel_dim, last), torch.empty_like(x)
    flags = {"RELU": spec.relu, "BATCH": spec.training}
    launch = _elementwise(kernels.batch_norm_apply_backward, geometry, True, x.dtype, x.device, **flags)
    sum_dy, sum_dy_xhat = sums.sum_dy.contiguous(), _contiguous(sums.sum_dy_xhat)
    launch((x, like(x, dy), output, *parameters, sum_dy, sum_dy_xhat, dx), (spec.eps, sums.inverse_count))
    return dx


def _parameters(channels: Channels) -> tuple[Tensor | None, ...]:
    """Weight, bias, mean and variance, in the order of the kernels."""
    mean, variance, weight, bias = channels
    return _contiguous(weight), _contiguous(bias), _contiguous(mean), _contiguous(variance)


# Kernels that lack their tensors --------------------------------------------------------------------------------------


def _summing(
    kernel: Any,
    geometry: config.Geometry,
    backward: bool,
    dtype: torch.dtype,
    device: torch.device,
    *sizes: int,
    **flags: bool,
) -> tuple[Any, int]:
    """A pass that sums, and how many parts it leaves."""
    here = facts(device)
    pace = config.pace(*geometry, backward, dtype.itemsize, here)
    tiles = config.tiling(geometry, pace.elements)
    parts = config.measure_programs(tiles.units, tiles.channel_blocks, here.multiprocessors, pace)
    constants = {**flags, **tiles.constants, "STAGES": pace.stages, "UNROLL": pace.unroll}
    grid = (parts * tiles.channel_blocks,)
    return kernel.prepare(grid, (*tiles.sizes, parts, *sizes), **constants, num_warps=pace.num_warps), parts


@launch_rule
def _elementwise(
    kernel: Any, geometry: config.Geometry, backward: bool, dtype: torch.dtype, device: torch.device, **flags: bool
) -> Any:
    chosen = config.apply_config(*geometry, backward, dtype.itemsize, facts(device))
    tiles = config.tiling(geometry, chosen.elements)
    grid = (tiles.units * tiles.channel_blocks,)
    return kernel.prepare(grid, tiles.sizes, **flags, **tiles.constants, num_warps=chosen.num_warps)


@launch_rule
def _finishing(kernel: Any, parts: int, channels: int, *sizes: int) -> Any:
    """What puts the results of parts together."""
    part_block, channel_block = config.finish_block(parts)
    grid, constants = (-(-channels // channel_block),), {"P_BLOCK": part_block, "C_BLOCK": channel_block}
    return kernel.prepare(grid, (parts, channels, *sizes), **constants, num_warps=config.FINISH_WARPS)
