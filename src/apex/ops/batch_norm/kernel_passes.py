"""Passes of a batch norm that launch kernels, without autograd.

A launch rule chooses and caches the launches of each pass from sizes and flags.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _library
from .._device import empty_on, facts, launch_rule
from . import config, reference
from .reference import BatchNormSpec, Channels, Exchange, GradientSums

kernels = _library.LazyModule(f"{__package__}.kernels")
kernels_whole = _library.LazyModule(f"{__package__}.kernels_whole")


def dense(tensor: Tensor, channel_dim: int) -> Tensor:
    """Return the tensor densely laid out for the kernels: with channels last in memory if they are, else contiguous."""
    if channel_dim == 1 and tensor.stride(1) == 1:
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    return tensor.contiguous()


def like(x: Tensor, tensor: Tensor | None) -> Any:
    """Return `tensor` in the memory layout of the dense `x`, with its own dtype."""
    if tensor is None or tensor.stride() == x.stride():
        return tensor
    return torch.empty_like(x, dtype=tensor.dtype).copy_(tensor)


def _contiguous(*parameters: Tensor | None) -> Any:
    return [None if each is None else each.contiguous() for each in parameters]


def _geometry(shape: tuple[int, ...], strides: tuple[int, ...], channel_dim: int) -> config.Geometry | None:
    """Return how a tensor lies in memory, or None if it is not dense in one of the two layouts."""
    images, channels, dimensions = shape[0], shape[channel_dim], range(len(shape))
    last = not _lies_in(dimensions[::-1], shape, strides)
    if last and (channel_dim == -1 or not _lies_in((1, *dimensions[:1:-1], 0), shape, strides)):
        return None
    count = math.prod(shape) // channels
    if last or channel_dim == -1 or count == images:
        return config.Geometry(1, count, channels, True)
    return config.Geometry(images, count // images, channels, False)


def _lies_in(order: Iterable[int], shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether a tensor is dense with its dimensions in this order in memory, the innermost first."""
    stride = 1
    for dimension in order:
        if shape[dimension] != 1 and strides[dimension] != stride:
            return False
        stride *= shape[dimension]
    return True


def launch_forward(
    input: Tensor, z: Tensor | None, running: Channels, spec: BatchNormSpec, exchange: Exchange | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the mean and variance that normalised it; in training, over the ranks of `exchange`."""
    mean, variance, weight, bias = running
    eps, momentum, training, _, channel_dim, _ = spec
    device, strides, flags = input.device, input.stride(), (training, exchange is None, reference.activation(spec))
    dtypes: tuple[Any, ...] = tuple([None if each is None else each.dtype for each in (input, z, *running)])
    launches = _forward_launches(input.shape, strides, channel_dim, dtypes, flags, device)
    if launches is None:
        return launch_forward(dense(input, channel_dim), z, running, spec, exchange)
    if z is not None and z.stride() != strides:
        z = like(input, z)
    for each in running:
        if each is not None and not each.is_contiguous():
            copies = Channels(*_contiguous(*running))
            results = launch_forward(input, z, copies, spec, exchange)
            if training:
                _write_back(running, copies)
            return results
    empty = empty_on(device)
    y = empty(launches.shape, strides, dtypes[0])
    if training:
        old, channels = (mean, variance), launches.channels
        mean, variance = empty(channels, (1,), torch.float32), empty(channels, (1,), torch.float32)
        if launches.whole is not None:
            launches.whole((input, z, weight, bias, *old, mean, variance, y), (eps, momentum))
            return y, mean, variance
        partials = empty((launches.partials,), (1,), torch.float32)
        launches.measure((input, partials))
        finish = launches.finish
        if exchange is not None:
            partials = exchange.gather(_rank_statistics(partials, launches, empty))
            finish = _combining(partials.shape, dtypes[2:4])
        finish((partials, mean, variance, *old, None, None, None), (momentum, 0.0))
    launches.apply((input, z, weight, bias, mean, variance, y), (eps,))
    return y, mean, variance


class ForwardLaunches(NamedTuple):
    """The prepared kernels of a forward pass, without their tensors: `whole` alone, or the others, in this order."""

    shape: tuple[int, ...]
    channels: tuple[int]
    rank_stats: tuple[int]
    whole: Any = None
    partials: int = 0  # elements of memory for the statistics of the parts
    measure: Any = None
    finish: Any = None
    apply: Any = None


@launch_rule
def _forward_launches(
    shape: Any,
    strides: tuple[int, ...],
    channel_dim: int,
    dtypes: tuple[Any, ...],
    flags: tuple[bool | str, ...],
    device: torch.device,
) -> ForwardLaunches | None:
    """Prepare the forward launches; return None for a tensor that is not dense."""
    dtype, (training, alone, activation), geometry = dtypes[0], flags, _geometry(shape, strides, channel_dim)
    if geometry is None:
        return None
    channels, pitch = geometry.channels, config.pitch(geometry.channels)
    results = (tuple(shape), (channels,), (2 * channels + 1,))
    if training and alone and config.held_whole(math.prod(shape), channels, geometry.last):
        grid, sizes, constants = config.whole_tiling(geometry)
        whole = kernels_whole.batch_norm_whole.prepare(grid, sizes, ACTIVATION=activation, **constants)
        return ForwardLaunches(*results, whole)
    apply = _elementwise(kernels.batch_norm_apply, geometry, False, dtype, device, ACTIVATION=activation)
    measure, parts = _summing(kernels.batch_norm_measure, geometry, False, dtype, device, pitch)
    finish = _finishing(kernels.batch_norm_statistics, parts, channels, pitch)
    return ForwardLaunches(*results, None, parts * pitch, measure, finish, apply)


def launch_statistics(input: Tensor, spec: BatchNormSpec, running: Channels) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance of every channel of one process, and scale and shift, [2, C].

    Running statistics move towards the mean and variance. A normalised input is input * scale + shift.
    """
    partials, launches, empty = _measured(input, spec.channel_dim)
    (channels,) = launches.channels
    scale_shift = empty((2, channels), (channels, 1), torch.float32)
    floats = (spec.momentum, spec.eps)
    mean, variance = _combine(partials, launches.finish, launches.channels, running, floats, empty, scale_shift)
    return mean, variance, scale_shift


def launch_rank_statistics(input: Tensor, channel_dim: int) -> Tensor:
    """Return means, sums of squared deviations and number of values per channel, [2C + 1]."""
    return _rank_statistics(*_measured(input, channel_dim))


def _measured(input: Tensor, channel_dim: int) -> tuple[Tensor, ForwardLaunches, Any]:
    """Return the statistics of parts of an input, the prepared launches, and a function that allocates tensors."""
    device, dtypes = input.device, (input.dtype, *[None] * 5)
    launches = _forward_launches(input.shape, input.stride(), channel_dim, dtypes, (True, False, ""), device)
    if launches is None:
        return _measured(dense(input, channel_dim), channel_dim)
    empty = empty_on(device)
    partials = empty((launches.partials,), (1,), torch.float32)
    launches.measure((input, partials))
    return partials, launches, empty


def _rank_statistics(partials: Tensor, launches: ForwardLaunches, empty: Any) -> Tensor:
    rank_stats = empty(launches.rank_stats, (1,), torch.float32)
    launches.finish((partials, rank_stats, None, None, None, None, None, None), (0.0, 0.0))
    return rank_stats


def launch_combine(
    all_ranks: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance over several processes, from their rank statistics, [P, 2C + 1]."""
    dtypes = tuple([None if each is None else each.dtype for each in (running_mean, running_var)])
    finish = _combining(all_ranks.shape, dtypes)
    channels, running = (all_ranks.shape[1] // 2,), Channels(running_mean, running_var)
    return _combine(all_ranks, finish, channels, running, (momentum, 0.0), empty_on(all_ranks.device))


@launch_rule
def _combining(shape: torch.Size, running: tuple[Any, ...]) -> Any:
    """Prepare the kernel that combines rank statistics, [P, 2C + 1], given the dtypes of running statistics."""
    ranks, pitch = shape
    return _finishing(kernels.batch_norm_statistics, ranks, pitch // 2, pitch)


def _combine(
    partials: Tensor,
    finish: Any,
    channels: tuple[int],
    running: Channels,
    floats: tuple[float, float],
    empty: Any,
    scale_shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of a whole from the statistics of its parts; move running statistics to them.

    `floats` are momentum and eps.
    """
    copies = Channels(*_contiguous(*running))
    mean, variance = empty(channels, (1,), torch.float32), empty(channels, (1,), torch.float32)
    finish((partials, mean, variance, *copies, scale_shift), floats)
    _write_back(running, copies)
    return mean, variance


def _write_back(running: Channels, copies: Channels) -> None:
    """Copy new running statistics back to tensors that are not contiguous, because a kernel changed a copy."""
    for own, copy in zip(running[:2], copies[:2], strict=True):
        if copy is not own:
            own.copy_(copy)


def launch_normalise(input: Tensor, z: Tensor | None, channels: Channels, spec: BatchNormSpec) -> Tensor:
    """Return the output, given mean and variance of every channel."""
    return launch_forward(input, z, channels, reference.evaluating(spec))[0]


def launch_backward(
    dy: Tensor,
    input: Tensor,
    output: Tensor | None,
    channels: Sequence[Tensor | None],
    spec: BatchNormSpec,
    exchange: Exchange | None,
    wants_input: bool,
    wants_z: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Return the gradients of input and addend (None if they are not wanted), weight and bias.

    `channels` are mean, variance, weight and bias.
    """
    mean, variance, weight, bias = channels
    eps, _, training, relu, channel_dim, _ = spec
    device, strides, write_dz = input.device, input.stride(), wants_z and relu
    tensors = (input, dy, output, *channels)
    dtypes: tuple[Any, ...] = tuple([None if each is None else each.dtype for each in tensors])
    flags = (training, wants_input, exchange is None, reference.activation(spec), write_dz)
    launches = _backward_launches(input.shape, strides, channel_dim, dtypes, flags, device)
    if launches is None:
        rest = (output, channels, spec, exchange, wants_input, wants_z)
        return launch_backward(dy, dense(input, channel_dim), *rest)
    if dy.stride() != strides:
        dy = like(input, dy)
    if output is not None and output.stride() != strides:
        output = like(input, output)
    for each in channels:
        if each is not None and not each.is_contiguous():
            mean, variance, weight, bias = _contiguous(*channels)
            break
    parameters = (weight, bias, mean, variance)
    empty = empty_on(device)
    sum_dy, sum_dy_xhat = empty(launches.channels, (1,), torch.float32), empty(launches.channels, (1,), torch.float32)
    dx = empty(launches.shape, strides, dtypes[0]) if wants_input else None
    dz = empty(launches.shape, strides, dtypes[1]) if write_dz else None
    if launches.whole is not None:
        launches.whole((input, dy, output, *parameters, sum_dy, sum_dy_xhat, dx, dz), (eps,))
        return dx, dy if wants_z and not relu else dz, sum_dy_xhat, sum_dy
    partials = empty((launches.partials,), (1,), torch.float32)
    launches.measure((input, dy, output, *parameters, dz, partials), (eps,))
    rank_stats = None if exchange is None else empty(launches.rank_stats, (1,), torch.float32)
    launches.sums((partials, sum_dy, sum_dy_xhat, rank_stats), (launches.values,))
    if dz is not None:  # the ReLU mask was applied: the output is no longer needed
        dy, output = dz, None
    sums: tuple[Tensor | None, ...] = (sum_dy, sum_dy_xhat)
    if exchange is not None:
        sum_dy, sum_dy_xhat = reference.over_ranks(exchange, rank_stats, sum_dy, sum_dy_xhat, wants_input)  # type: ignore[arg-type]
        sums = (rank_stats, None)
    if wants_input:
        launches.apply((input, dy, output, *parameters, *sums, dx), (eps, 1 / launches.values))
    return dx, dy if wants_z else None, sum_dy_xhat, sum_dy


class BackwardLaunches(NamedTuple):
    """The prepared kernels of a backward pass, without their tensors: `whole` alone, or the others, in this order."""

    shape: tuple[int, ...]
    channels: tuple[int]
    rank_stats: tuple[int]
    values: float  # values per channel
    whole: Any = None
    partials: int = 0  # elements of memory for the sums of the parts
    measure: Any = None
    sums: Any = None
    apply: Any = None


@launch_rule
def _backward_launches(
    shape: Any,
    strides: tuple[int, ...],
    channel_dim: int,
    dtypes: tuple[Any, ...],
    flags: tuple[bool | str, ...],
    device: torch.device,
) -> BackwardLaunches | None:
    """Prepare the backward launches; return None for a tensor that is not dense."""
    (dtype, dy_dtype, *_), (training, wants_input, alone, activation, write_dz) = dtypes, flags
    geometry = _geometry(shape, strides, channel_dim)
    if geometry is None:
        return None
    channels, count = geometry.channels, float(geometry.images * geometry.positions)
    results = (tuple(shape), (channels,), (2 * channels + 1,), count)
    if training and wants_input and alone and config.held_whole(math.prod(shape), channels, geometry.last):
        grid, sizes, constants = config.whole_tiling(geometry)
        whole = kernels_whole.batch_norm_whole_backward.prepare(grid, sizes, ACTIVATION=activation, **constants)
        return BackwardLaunches(*results, whole)
    measure, parts = _summing(
        kernels.batch_norm_measure_backward, geometry, True, dy_dtype, device, ACTIVATION=activation
    )
    sums = _finishing(kernels.batch_norm_sums, parts, channels)
    constants = {"ACTIVATION": "" if write_dz else activation, "BATCH": training}
    apply = _elementwise(kernels.batch_norm_apply_backward, geometry, True, dtype, device, **constants)
    return BackwardLaunches(*results, None, parts * 2 * channels, measure, sums, apply)


def launch_input_gradient(
    dy: Tensor, input: Tensor, output: Tensor | None, channels: Channels, sums: GradientSums, spec: BatchNormSpec
) -> Tensor:
    """Return the input's gradient, by the elementwise kernel."""
    x = dense(input, spec.channel_dim)
    geometry, dx = _geometry(x.shape, x.stride(), spec.channel_dim), torch.empty_like(x)
    assert geometry is not None
    flags = {"ACTIVATION": reference.activation(spec), "BATCH": spec.training}
    launch = _elementwise_of_any(kernels.batch_norm_apply_backward, geometry, True, x.dtype, x.device, **flags)
    mean, variance, weight, bias = channels
    contiguous = _contiguous(weight, bias, mean, variance, sums.sum_dy, sums.sum_dy_xhat)
    launch((x, like(x, dy), like(x, output), *contiguous, dx), (spec.eps, sums.inverse_count))
    return dx


def _summing(
    kernel: Any,
    geometry: config.Geometry,
    backward: bool,
    dtype: torch.dtype,
    device: torch.device,
    *sizes: int,
    **flags: bool | str,
) -> tuple[Any, int]:
    """Prepare a pass that sums, and return it with the number of partial results that it writes."""
    here = facts(device)
    pace = config.pace(*geometry, backward, dtype.itemsize, here)
    tiles = config.tiling(geometry, pace.elements)
    parts = config.measure_programs(tiles.units, tiles.channel_blocks, here.multiprocessors, pace)
    constants = {**flags, **tiles.constants, "STAGES": pace.stages, "UNROLL": pace.unroll}
    grid = (parts * tiles.channel_blocks,)
    return kernel.prepare(grid, (*tiles.sizes, parts, *sizes), **constants, num_warps=pace.num_warps), parts


def _elementwise(
    kernel: Any,
    geometry: config.Geometry,
    backward: bool,
    dtype: torch.dtype,
    device: torch.device,
    **flags: bool | str,
) -> Any:
    chosen = config.apply_config(*geometry, backward, dtype.itemsize, facts(device))
    tiles = config.tiling(geometry, chosen.elements)
    grid = (tiles.units * tiles.channel_blocks,)
    return kernel.prepare(grid, tiles.sizes, **flags, **tiles.constants, num_warps=chosen.num_warps)


_elementwise_of_any = launch_rule(_elementwise)  # for tensors whose dtypes may differ between launches


def _finishing(kernel: Any, parts: int, channels: int, *sizes: int) -> Any:
    """Prepare a kernel that combines the partial results of parts."""
    part_block, channel_block = config.finish_block(parts)
    constants: dict[str, Any] = {"P_BLOCK": part_block, "C_BLOCK": channel_block}
    grid = (-(-channels // channel_block),)
    return kernel.prepare(grid, (parts, channels, *sizes), **constants, num_warps=config.FINISH_WARPS)
