"""From tensors to launches: plans of everything that shapes and dtypes decide."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .._results import maker
from .._workspace import partial_sums_on
from . import config
from .layout import Geometry, Kind

if TYPE_CHECKING:
    from .._launch import BoundLaunch


@functools.cache
def _kernels() -> ModuleType:
    """Imported at first use: importing apex needs no Triton."""
    from . import kernels

    return kernels


class Present(NamedTuple):
    """Dtypes of what a norm may have beside its input; None for what it has not."""

    weight: torch.dtype | None
    bias: torch.dtype | None


class CombinePlan:
    """Statistics of a whole from those of its parts, in one launch; with `running` ones, these move towards them."""

    def __init__(self, parts: int, channels: int, pitch: int, running: bool, device: torch.device) -> None:
        part_block, channel_block = config.finish_block(parts)
        self._per_channel = maker((channels,), torch.float32, device)
        self._sizes = (parts, channels, pitch)
        self._statistics = _kernels().batch_norm_statistics.bind(
            (-(-channels // channel_block),),
            (*self._sizes, 0.0),
            (running, False, part_block, channel_block),
            device=device,
            num_warps=config.FINISH_WARPS,
        )

    def run(
        self,
        stream: int | None,
        parts: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
    ) -> tuple[Tensor, Tensor]:
        """Mean and biased variance."""
        mean, variance = self._per_channel(stream), self._per_channel(stream)
        numbers = (*self._sizes, momentum)
        self._statistics(parts, mean, variance, running_mean, running_var, floats=numbers, stream=stream)
        return mean, variance


class MeasurePlan:
    """Statistics of an input, in two launches; with `running` ones, these move towards them."""

    def __init__(self, geometry: Geometry, running: bool, device: torch.device, multiprocessors: int) -> None:
        self._measure, programs = _bound_measure(geometry, device, multiprocessors)
        pitch = config.pitch(geometry.channels)
        self._device, self._partials = device, programs * pitch
        self._combine = CombinePlan(programs, geometry.channels, pitch, running, device)

    def run(
        self,
        stream: int | None,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
    ) -> tuple[Tensor, Tensor]:
        """Mean and biased variance."""
        partials, _ = partial_sums_on(stream, self._partials, self._device)
        self._measure(x, partials, stream=stream)
        return self._combine.run(stream, partials, running_mean, running_var, momentum)


class PacketPlan:
    """What a process tells others of its input, in two launches."""

    def __init__(self, geometry: Geometry, device: torch.device, multiprocessors: int) -> None:
        self._measure, programs = _bound_measure(geometry, device, multiprocessors)
        part_block, channel_block = config.finish_block(programs)
        pitch = config.pitch(geometry.channels)
        self._device, self._partials = device, programs * pitch
        self._packet = maker((2 * geometry.channels + 1,), torch.float32, device)
        self._finish = _kernels().batch_norm_statistics.bind(
            (-(-geometry.channels // channel_block),),
            (programs, geometry.channels, pitch, 0.0),
            (False, True, part_block, channel_block),
            device=device,
            num_warps=config.FINISH_WARPS,
        )

    def run(self, stream: int | None, x: Tensor) -> Tensor:
        """Means, sums of squared deviations and a count: [2C + 1]."""
        partials, _ = partial_sums_on(stream, self._partials, self._device)
        packet = self._packet(stream)
        self._measure(x, partials, stream=stream)
        self._finish(partials, packet, None, None, None, stream=stream)
        return packet


def _bound_measure(geometry: Geometry, device: torch.device, multiprocessors: int) -> tuple[BoundLaunch, int]:
    """The pass over the input that finds statistics of parts, and how many parts these are."""
    pace = config.FORWARD_PACE
    tiles = config.tiling(geometry.positions, geometry.channels, geometry.last, pace.elements)
    units = geometry.images * tiles.chunks
    programs = config.measure_programs(units, tiles.channel_blocks, multiprocessors, pace)
    align = config.alignment(geometry.positions, geometry.last)
    steps, pitch = geometry.positions // align, config.pitch(geometry.channels)
    bound = _kernels().batch_norm_measure.bind(
        (programs * tiles.channel_blocks,),
        (steps, geometry.channels, tiles.chunks, units, programs, tiles.channel_blocks, pitch),
        (geometry.last, align, tiles.rows, tiles.channel_block, pace.unroll),
        device=device,
        num_warps=config.WARPS,
    )
    return bound, programs


class ApplyPlan:
    """The output, in one launch."""

    def __init__(self, kind: Kind, present: Present, has_z: bool, eps: float, relu: bool, device: torch.device) -> None:
        geometry, self._output = kind.geometry, kind.maker(device)
        tiles = config.tiling(geometry.positions, geometry.channels, geometry.last, config.APPLY_TILE)
        units = geometry.images * tiles.chunks
        has_weight, has_bias = (each is not None for each in present)
        align = config.alignment(geometry.positions, geometry.last)
        steps = geometry.positions // align
        self._apply = _kernels().batch_norm_apply.bind(
            (units * tiles.channel_blocks,),
            (steps, geometry.channels, tiles.chunks, units, tiles.channel_blocks, float(eps)),
            (
                has_z,
                has_weight,
                has_bias,
                relu,
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
        stream: int | None,
        x: Tensor,
        z: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        """The output, laid out as the input."""
        y = self._output(stream)
        self._apply(x, z, weight, bias, mean, variance, y, stream=stream)
        return y


class SumsPlan:
    """Per channel the sums of the gradient, and of it times the normalised input, in two launches."""

    def __init__(
        self,
        kind: Kind,
        present: Present,
        mask: int,
        write_dz: bool,
        packet: bool,
        eps: float,
        dy: torch.dtype,
        device: torch.device,
        multiprocessors: int,
    ) -> None:
        kernels, geometry = _kernels(), kind.geometry
        channels = geometry.channels
        pace = config.backward_pace(geometry.positions, geometry.last, dy.itemsize)
        tiles = config.tiling(geometry.positions, channels, geometry.last, pace.elements)
        units = geometry.images * tiles.chunks
        programs = config.measure_programs(units, tiles.channel_blocks, multiprocessors, pace)
        align = config.alignment(geometry.positions, geometry.last)
        steps = geometry.positions // align
        has_weight, has_bias = (each is not None for each in present)
        self._device, self._partials = device, programs * 2 * channels
        self._dz = kind.maker(device, dy) if write_dz else None
        self._sum = maker((channels,), torch.float32, device)
        self._packet = maker((2 * channels + 1,), torch.float32, device) if packet else None
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
                pace.unroll,
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
        stream: int | None,
        dy: Tensor,
        x: Tensor,
        y: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
        """What ReLU lets through of the gradient, where it is to be written, the sums, in float32, and a packet."""
        dz = None if self._dz is None else self._dz(stream)
        partials, _ = partial_sums_on(stream, self._partials, self._device)
        plain, along = self._sum(stream), self._sum(stream)
        packet = None if self._packet is None else self._packet(stream)
        self._measure(x, dy, y, weight, bias, mean, variance, dz, partials, stream=stream)
        self._sums(partials, plain, along, packet, stream=stream)
        return dz, plain, along, packet


class InputGradientPlan:
    """The input's gradient, in one launch."""

    def __init__(
        self,
        kind: Kind,
        present: Present,
        mask: int,
        training: bool,
        eps: float,
        inverse_count: float | None,
        device: torch.device,
    ) -> None:
        geometry, self._dx = kind.geometry, kind.maker(device)
        elements = config.APPLY_BACKWARD_TILE[geometry.last]
        tiles = config.tiling(geometry.positions, geometry.channels, geometry.last, elements)
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
        stream: int | None,
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
        dx = self._dx(stream)
        self._apply(x, dy, y, weight, bias, mean, variance, plain, along, dx, stream=stream)
        return dx
