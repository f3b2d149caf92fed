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
def _kernels() -> tuple[ModuleType, ModuleType]:
    """Those forward and backward, imported at first use: importing apex needs no Triton."""
    from . import kernels, kernels_backward

    return kernels, kernels_backward


class Present(NamedTuple):
    """Dtypes of what a norm may have beside its input; None for what it has not."""

    weight: torch.dtype | None
    bias: torch.dtype | None


def _bound_statistics(
    parts: int, channels: int, pitch: int, running: bool, packet: bool, device: torch.device
) -> BoundLaunch:
    part_block, channel_block = config.finish_block(parts)
    return _kernels()[0].batch_norm_statistics.bind(
        (-(-channels // channel_block),),
        (parts, channels, pitch, 0.0),
        (running, packet, part_block, channel_block),
        device=device,
        num_warps=config.FINISH_WARPS,
    )


class CombinePlan:
    """Statistics of a whole from those of its parts, in one launch; with `running` ones, these move towards them."""

    def __init__(self, parts: int, channels: int, pitch: int, running: bool, device: torch.device) -> None:
        self._per_channel = maker((channels,), torch.float32, device)
        self._sizes = (parts, channels, pitch)
        self._statistics = _bound_statistics(parts, channels, pitch, running, False, device)

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
        numbers = (*self._sizes, float(momentum))
        self._statistics(parts, mean, variance, running_mean, running_var, floats=numbers, stream=stream)
        return mean, variance


class MeasurePlan:
    """Statistics of an input, in two launches; with `running` ones, these move towards them."""

    def __init__(self, geometry: Geometry, running: bool, device: torch.device, multiprocessors: int) -> None:
        self._per_channel = maker((geometry.channels,), torch.float32, device)
        self._measure = _Measure(geometry, running, False, device, multiprocessors)

    def run(
        self,
        stream: int | None,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
    ) -> tuple[Tensor, Tensor]:
        """Mean and biased variance."""
        mean, variance = self._per_channel(stream), self._per_channel(stream)
        self._measure.run(stream, x, mean, variance, running_mean, running_var, momentum)
        return mean, variance


class PacketPlan:
    """What a process tells others of its input, in two launches."""

    def __init__(self, geometry: Geometry, device: torch.device, multiprocessors: int) -> None:
        self._packet = maker((2 * geometry.channels + 1,), torch.float32, device)
        self._measure = _Measure(geometry, False, True, device, multiprocessors)

    def run(self, stream: int | None, x: Tensor) -> Tensor:
        """Means, sums of squared deviations and a count: [2C + 1]."""
        packet = self._packet(stream)
        self._measure.run(stream, x, packet, None, None, None, 0.0)
        return packet


class _Measure:
    """The pass over the input that finds statistics of parts, and the launch that puts them together."""

    def __init__(
        self, geometry: Geometry, running: bool, packet: bool, device: torch.device, multiprocessors: int
    ) -> None:
        pace, channels = config.FORWARD_PACE, geometry.channels
        tiles = config.tiling(geometry.positions, channels, geometry.last, pace.elements)
        units = geometry.images * tiles.chunks
        programs = config.measure_programs(units, tiles.channel_blocks, multiprocessors, pace)
        align = config.alignment(geometry.positions, geometry.last)
        steps, pitch = geometry.positions // align, config.pitch(channels)
        self._device, self._partials = device, programs * pitch
        self._measure = _kernels()[0].batch_norm_measure.bind(
            (programs * tiles.channel_blocks,),
            (steps, channels, tiles.chunks, units, programs, tiles.channel_blocks, pitch),
            (geometry.last, align, tiles.rows, tiles.channel_block, pace.unroll),
            device=device,
            num_warps=config.WARPS,
        )
        self._sizes = (programs, channels, pitch)
        self._finish = _bound_statistics(programs, channels, pitch, running, packet, device)

    def run(
        self,
        stream: int | None,
        x: Tensor,
        mean: Tensor,
        variance: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
    ) -> None:
        """Fills `mean` and `variance`, or the former as a packet."""
        partials, _ = partial_sums_on(stream, self._partials, self._device)
        self._measure(x, partials, stream=stream)
        numbers = (*self._sizes, float(momentum))
        self._finish(partials, mean, variance, running_mean, running_var, floats=numbers, stream=stream)


class ApplyPlan:
    """The output, in one launch."""

    def __init__(self, kind: Kind, present: Present, has_z: bool, eps: float, relu: bool, device: torch.device) -> None:
        geometry, self._output = kind.geometry, kind.maker(device)
        tiles = config.tiling(geometry.positions, geometry.channels, geometry.last, config.APPLY_TILE)
        units = geometry.images * tiles.chunks
        has_weight, has_bias = (each is not None for each in present)
        align = config.alignment(geometry.positions, geometry.last)
        steps = geometry.positions // align
        self._apply = _kernels()[0].batch_norm_apply.bind(
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
        kernels, geometry = _kernels()[1], kind.geometry
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
        self._apply = _kernels()[1].batch_norm_apply_backward.bind(
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
