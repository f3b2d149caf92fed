"""From tensors to launches: what shapes and dtypes decide is planned once and cached."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import _device
from . import config
from .spec import BatchNormSpec

if TYPE_CHECKING:
    from .._launch import BoundLaunch


@functools.cache
def _kernels() -> ModuleType:
    """Imported at first use: importing apex needs no Triton."""
    from . import kernels

    return kernels


class Geometry(NamedTuple):
    """Images, positions of each and channels, as they lie in memory; images are one where channels are last."""

    images: int
    positions: int
    channels: int
    last: bool

    @property
    def values(self) -> int:
        """Values per channel."""
        return self.images * self.positions


class Present(NamedTuple):
    """Dtypes of what a norm may have beside its input; None for what it has not."""

    weight: torch.dtype | None
    bias: torch.dtype | None


class CombinePlan:
    """Statistics of a whole from those of its parts, in one launch."""

    def __init__(self, parts: int, channels: int, pitch: int, momentum: float | None, device: torch.device) -> None:
        part_block, channel_block = config.finish_block(parts)
        self._device, self._channels = device, (channels,)
        self._statistics = _kernels().batch_norm_statistics.bind(
            (-(-channels // channel_block),),
            (parts, channels, pitch, 0.0 if momentum is None else float(momentum)),
            (momentum is not None, False, part_block, channel_block),
            device=device,
            num_warps=config.FINISH_WARPS,
        )

    def run(self, parts: Tensor, running_mean: Tensor | None, running_var: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and biased variance; moves the running ones towards them where the plan has a momentum."""
        mean = torch.empty(self._channels, dtype=torch.float32, device=self._device)
        variance = torch.empty(self._channels, dtype=torch.float32, device=self._device)
        self._statistics(parts, mean, variance, running_mean, running_var)
        return mean, variance


class MeasurePlan:
    """Statistics of an input, in two launches."""

    def __init__(self, geometry: Geometry, momentum: float | None, device: torch.device, multiprocessors: int) -> None:
        self._measure, programs = _bound_measure(geometry, device, multiprocessors)
        pitch = config.pitch(geometry.channels)
        self._device, self._partials = device, programs * pitch
        self._combine = CombinePlan(programs, geometry.channels, pitch, momentum, device)

    def run(self, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and biased variance; moves the running ones towards them where the plan has a momentum."""
        partials = torch.empty(self._partials, dtype=torch.float32, device=self._device)
        self._measure(x, partials)
        return self._combine.run(partials, running_mean, running_var)


class PacketPlan:
    """What a process tells others of its input, in two launches."""

    def __init__(self, geometry: Geometry, device: torch.device, multiprocessors: int) -> None:
        self._measure, programs = _bound_measure(geometry, device, multiprocessors)
        part_block, channel_block = config.finish_block(programs)
        pitch = config.pitch(geometry.channels)
        self._device, self._partials, self._packet = device, programs * pitch, 2 * geometry.channels + 1
        self._finish = _kernels().batch_norm_statistics.bind(
            (-(-geometry.channels // channel_block),),
            (programs, geometry.channels, pitch, 0.0),
            (False, True, part_block, channel_block),
            device=device,
            num_warps=config.FINISH_WARPS,
        )

    def run(self, x: Tensor) -> Tensor:
        """Means, sums of squared deviations and a count: [2C + 1]."""
        partials = torch.empty(self._partials, dtype=torch.float32, device=self._device)
        packet = torch.empty(self._packet, dtype=torch.float32, device=self._device)
        self._measure(x, partials)
        self._finish(partials, packet, None, None, None)
        return packet


def _bound_measure(geometry: Geometry, device: torch.device, multiprocessors: int) -> tuple[BoundLaunch, int]:
    """The pass over the input that finds statistics of parts, and how many parts these are."""
    tiles = config.tiling(geometry.positions, geometry.channels, geometry.last, config.MEASURE_TILE)
    units = geometry.images * tiles.chunks
    programs = config.measure_programs(units, tiles.channel_blocks, multiprocessors, config.UNROLL)
    align = config.alignment(geometry.positions, geometry.last)
    steps, pitch = geometry.positions // align, config.pitch(geometry.channels)
    bound = _kernels().batch_norm_measure.bind(
        (programs * tiles.channel_blocks,),
        (steps, geometry.channels, tiles.chunks, units, programs, tiles.channel_blocks, pitch),
        (geometry.last, align, tiles.rows, tiles.channel_block, config.UNROLL),
        device=device,
        num_warps=config.WARPS,
    )
    return bound, programs


class ApplyPlan:
    """The output, in one launch."""

    def __init__(
        self, geometry: Geometry, present: Present, has_z: bool, eps: float, relu: bool, device: torch.device
    ) -> None:
        tiles = config.tiling(geometry.positions, geometry.channels, geometry.last, config.APPLY_TILE)
        units = geometry.images * tiles.chunks
        has_weight, has_bias = (each is not None for each in present)
        align = config.alignment(geometry.positions, geometry.last)
        steps = geometry.positions // align
        self._apply = _kernels().batch_norm_apply.bind(
            (units * tiles.channel_blocks,),
            (steps, geometry.channels, tiles.chunks, units, tiles.channel_blocks, float(eps)),
            (has_z, has_weight, has_bias, relu, geometry.last, align, tiles.rows, tiles.channel_block),
            device=device,
            num_warps=config.WARPS,
        )

    def run(
        self,
        x: Tensor,
        z: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        """The output, laid out as the input."""
        y = torch.empty_like(x)
        self._apply(x, z, weight, bias, mean, variance, y)
        return y


class SumsPlan:
    """Per channel the sums of the gradient, and of it times the normalised input, in two launches."""

    def __init__(
        self,
        geometry: Geometry,
        present: Present,
        mask: int,
        write_dz: bool,
        packet: bool,
        eps: float,
        device: torch.device,
        multiprocessors: int,
    ) -> None:
        kernels, channels = _kernels(), geometry.channels
        tiles = config.tiling(geometry.positions, channels, geometry.last, config.MEASURE_BACKWARD_TILE)
        units = geometry.images * tiles.chunks
        programs = config.measure_programs(units, tiles.channel_blocks, multiprocessors, config.UNROLL_BACKWARD)
        align = config.alignment(geometry.positions, geometry.last)
        steps = geometry.positions // align
        has_weight, has_bias = (each is not None for each in present)
        self._device, self._channels, self._write_dz = device, (channels,), write_dz
        self._partials, self._packet = (programs, 2, channels), 2 * channels + 1 if packet else None
        self._measure = kernels.batch_norm_measure_backward.bind(
            (programs * tiles.channel_blocks,),
            (steps, channels, tiles.chunks, units, programs, tiles.channel_blocks, float(eps)),
            (
                has_weight,
                has_bias,
                mask,
                write_dz,
                geometry.last,
                align,
                tiles.rows,
                tiles.channel_block,
                config.UNROLL_BACKWARD,
            ),
            device=device,
            num_warps=config.WARPS,
        )
        part_block, channel_block = config.finish_block(programs)
        self._sums = kernels.batch_norm_sums.bind(
            (-(-channels // channel_block),),
            (programs, channels, float(geometry.values)),
            (packet, part_block, channel_block),
            device=device,
            num_warps=config.FINISH_WARPS,
        )

    def run(
        self,
        dy: Tensor,
        x: Tensor,
        y: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
        """What ReLU lets through of the gradient, where it is to be written, the sums, in float32, and a packet."""
        dz = torch.empty_like(dy) if self._write_dz else None
        partials = torch.empty(self._partials, dtype=torch.float32, device=self._device)
        plain = torch.empty(self._channels, dtype=torch.float32, device=self._device)
        along = torch.empty(self._channels, dtype=torch.float32, device=self._device)
        packet = None
        if self._packet is not None:
            packet = torch.empty(self._packet, dtype=torch.float32, device=self._device)
        self._measure(x, dy, y, weight, bias, mean, variance, dz, partials)
        self._sums(partials, plain, along, packet)
        return dz, plain, along, packet


class InputGradientPlan:
    """The input's gradient, in one launch."""

    def __init__(
        self,
        geometry: Geometry,
        present: Present,
        mask: int,
        training: bool,
        eps: float,
        inverse_count: float | None,
        device: torch.device,
    ) -> None:
        tiles = config.tiling(geometry.positions, geometry.channels, geometry.last, config.APPLY_BACKWARD_TILE)
        units = geometry.images * tiles.chunks
        has_weight, has_bias = (each is not None for each in present)
        align = config.alignment(geometry.positions, geometry.last)
        self._apply = _kernels().batch_norm_apply_backward.bind(
            (units * tiles.channel_blocks,),
            (
                geometry.positions // align,
                geometry.channels,
                tiles.chunks,
                units,
                tiles.channel_blocks,
                float(eps),
                0.0 if inverse_count is None else float(inverse_count),
            ),
            (
                has_weight,
                has_bias,
                mask,
                training,
                inverse_count is None,
                geometry.last,
                align,
                tiles.rows,
                tiles.channel_block,
            ),
            device=device,
            num_warps=config.WARPS,
        )

    def run(
        self,
        dy: Tensor,
        x: Tensor,
        y: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        plain: Tensor,
        along: Tensor | None,
    ) -> Tensor:
        """The gradient, laid out as the input; without an inverse of a count `plain` is a packet."""
        dx = torch.empty_like(x)
        self._apply(x, dy, y, weight, bias, mean, variance, plain, along, dx)
        return dx


# `dtypes`, of tensors that are not among the other arguments, are part of the keys because a bound launch is for one
# set of them; `facts` because launch rules ask them.
@functools.lru_cache(maxsize=4096)
def _measure_plan(geometry, momentum, dtypes, device, facts):
    return MeasurePlan(geometry, momentum, device, facts.multiprocessors)


@functools.lru_cache(maxsize=4096)
def _combine_plan(parts, channels, momentum, dtypes, device):
    return CombinePlan(parts, channels, 2 * channels + 1, momentum, device)


@functools.lru_cache(maxsize=4096)
def _apply_plan(geometry, present, eps, relu, dtypes, device, facts):
    return ApplyPlan(geometry, present, dtypes[1] is not None, eps, relu, device)


@functools.lru_cache(maxsize=4096)
def _packet_plan(geometry, dtype, device, facts):
    return PacketPlan(geometry, device, facts.multiprocessors)


@functools.lru_cache(maxsize=4096)
def _sums_plan(geometry, present, mask, write_dz, packet, eps, dtypes, device, facts):
    return SumsPlan(geometry, present, mask, write_dz, packet, eps, device, facts.multiprocessors)


@functools.lru_cache(maxsize=4096)
def _input_gradient_plan(geometry, present, mask, training, eps, inverse_count, dtypes, device, facts):
    return InputGradientPlan(geometry, present, mask, training, eps, inverse_count, device)


def clear_plans() -> None:
    """Forgets every plan, after a change of launch rules."""
    for cache in (_measure_plan, _combine_plan, _packet_plan, _apply_plan, _sums_plan, _input_gradient_plan):
        cache.cache_clear()


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def triton_statistics(
    x: Tensor,
    geometry: Geometry,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    momentum: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of a dense input; with a momentum, running statistics (contiguous) are updated."""
    dtypes = (x.dtype, _dtype(running_mean), _dtype(running_var))
    plan = _measure_plan(geometry, momentum, dtypes, x.device, _device.facts(x.device))
    return plan.run(x, running_mean, running_var)


def triton_packet(x: Tensor, geometry: Geometry) -> Tensor:
    """Means, sums of squared deviations and number of values of a dense input."""
    return _packet_plan(geometry, x.dtype, x.device, _device.facts(x.device)).run(x)


def triton_combine(
    parts: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, momentum: float | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance from those of parts, as kernels leave them; otherwise as `triton_statistics`."""
    dtypes = (_dtype(running_mean), _dtype(running_var))
    plan = _combine_plan(parts.shape[0], parts.shape[1] // 2, momentum, dtypes, parts.device)
    return plan.run(parts, running_mean, running_var)


def triton_apply(
    x: Tensor,
    geometry: Geometry,
    z: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
) -> Tensor:
    """The output, given statistics; `z` is laid out as `x`, everything else contiguous."""
    present = Present(_dtype(weight), _dtype(bias))
    dtypes = (x.dtype, _dtype(z), mean.dtype, variance.dtype)
    plan = _apply_plan(geometry, present, spec.eps, spec.relu, dtypes, x.device, _device.facts(x.device))
    return plan.run(x, z, mean, variance, weight, bias)


def triton_sums(
    dy: Tensor,
    x: Tensor,
    geometry: Geometry,
    y: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
    write_dz: bool,
    packet: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """What ReLU lets through (where it is to be written), its sums, and these as a packet with the count (likewise).

    `dy` and `y` are laid out as `x`.
    """
    present = Present(_dtype(weight), _dtype(bias))
    dtypes = (x.dtype, dy.dtype, _dtype(y), mean.dtype, variance.dtype)
    flags = (_mask(spec, y), write_dz, packet, spec.eps)
    plan = _sums_plan(geometry, present, *flags, dtypes, x.device, _device.facts(x.device))
    return plan.run(dy, x, y, mean, variance, weight, bias)


def triton_input_gradient(
    dy: Tensor,
    x: Tensor,
    geometry: Geometry,
    y: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    plain: Tensor,
    along: Tensor | None,
    inverse_count: float | None,
    spec: BatchNormSpec,
) -> Tensor:
    """The input's gradient, given the sums over everything that was normalised together.

    `plain` may be a packet: then `along` and `inverse_count` are None.
    """
    present = Present(_dtype(weight), _dtype(bias))
    dtypes = (x.dtype, dy.dtype, _dtype(y), mean.dtype, variance.dtype)
    plan = _input_gradient_plan(
        geometry,
        present,
        _mask(spec, y),
        spec.training,
        spec.eps,
        inverse_count,
        dtypes,
        x.device,
        _device.facts(x.device),
    )
    return plan.run(dy, x, y, mean, variance, weight, bias, plain, along)


def _mask(spec: BatchNormSpec, y: Tensor | None) -> int:
    """How the kernels learn what ReLU let through."""
    return 0 if not spec.relu else 1 if y is None else 2


def geometry_of(tensor: Tensor, spec: BatchNormSpec) -> Geometry:
    """The geometry of a dense tensor."""
    channels = tensor.shape[spec.channel_dim]
    count = tensor.numel() // channels
    if spec.channel_dim == -1 or count == tensor.shape[0] or not tensor.is_contiguous():
        return Geometry(1, count, channels, True)
    return Geometry(tensor.shape[0], count // tensor.shape[0], channels, False)


def dense(tensor: Tensor, spec: BatchNormSpec) -> Tensor:
    """The tensor as the kernels take it: contiguous in one of the two layouts."""
    if tensor.is_contiguous() or (
        spec.channel_dim == 1 and tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    ):
        return tensor
    if spec.channel_dim == 1 and tensor.stride(1) == 1:
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    return tensor.contiguous()


def laid_out_like(x: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` in the memory layout of `x`, its own dtype kept."""
    if tensor.stride() == x.stride():
        return tensor
    return torch.empty_like(x, dtype=tensor.dtype).copy_(tensor)
