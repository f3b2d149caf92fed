"""From tensors to launches: what shapes and dtypes decide is planned once and cached."""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import _device
from .._results import Like, like, maker
from .._workspace import TICKETS, partial_sums_on
from . import config
from .spec import GroupNormSpec

if TYPE_CHECKING:
    from .._launch import BoundLaunch


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    """Imported at first use: importing apex needs no Triton."""
    from . import kernels, kernels_walk

    return kernels, kernels_walk


class _Dense(NamedTuple):
    """What an input is like: contiguous, or with its channels `last` in memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    last: bool
    dtype: torch.dtype


class _Shape:
    """Sizes of one input, whether its channels are last in memory, and the flags that every kernel takes."""

    def __init__(
        self, input: _Dense, spec: GroupNormSpec, weight: Like | None, bias: Like | None, device: torch.device
    ) -> None:
        self.images, self.channels = input.sizes[:2]
        self.positions, self.spec = math.prod(input.sizes[2:]), spec
        self.groups = spec.groups
        self.group_channels = self.channels // spec.groups
        self.last, self.strides = input.last, input.strides
        self.has_weight, self.has_bias = weight is not None, bias is not None
        self.flags = (self.has_weight, self.has_bias, spec.silu, self.last)
        self.group_block = _device.next_power_of_2(self.group_channels)
        # Results like the input and like the parameters, where there are any.
        self.device = device
        self.like_input = maker(input.sizes, input.dtype, device, input.strides)
        self.like_parameters = tuple(None if each is None else maker(*each, device) for each in (weight, bias))

    def small(self, direction: str) -> config.SmallConfig | None:
        return config.small_config(self.positions, self.group_channels, direction)

    def walk(self, direction: str) -> config.WalkConfig | None:
        return config.walk_config(self.images, self.positions, self.channels, self.group_channels, direction)


class ForwardPlan:
    """Launches of a forward pass: one where a program takes a whole group, three where groups are cut up."""

    def __init__(self, shape: _Shape) -> None:
        (kernels, walks), spec, device = _kernels(), shape.spec, shape.device
        small, walk = shape.small("forward"), shape.walk("forward")
        self.spec = spec
        self._shape = shape
        self._y = shape.like_input
        self._new_statistics = maker((shape.images, shape.groups, 2), torch.float32, device)
        self._backward: dict[bool, BackwardPlan] = {}
        self._whole: BoundLaunch | None = None
        sizes = (shape.positions, shape.channels, spec.groups)
        if small is not None:
            self._whole = kernels.group_norm_forward_small.bind(
                (shape.images * spec.groups,),
                (*sizes, float(spec.eps)),
                (shape.group_channels, *shape.flags, small.position_block, small.channel_block),
                device=device,
                num_warps=small.num_warps,
            )
            return
        if walk is not None:
            self._whole = walks.group_norm_forward_walk.bind(
                (shape.images * spec.groups,),
                (*sizes, float(spec.eps)),
                (shape.group_channels, *shape.flags, walk.position_block, walk.channel_block, walk.stages),
                device=device,
                num_warps=walk.num_warps,
            )
            return
        tile = config.tile_config(shape.positions, shape.channels, config.FORWARD_TILE[shape.last], shape.last)
        grid = (shape.images * tile.chunks, tile.channel_blocks)
        self._partials = maker((shape.images, tile.chunks, 2, shape.channels), torch.float32, device)
        self._measure = kernels.group_norm_measure.bind(
            grid,
            (shape.positions, shape.channels, tile.chunks),
            (shape.last, tile.rows, tile.channel_block),
            device=device,
            num_warps=config.FORWARD_WARPS,
        )
        self._statistics = kernels.group_norm_statistics.bind(
            (shape.images * spec.groups,),
            (*sizes, tile.chunks),
            (shape.group_channels, tile.rows, config.CHUNK_BLOCK, shape.group_block),
            device=device,
            num_warps=config.SUM_WARPS,
        )
        self._apply = kernels.group_norm_apply.bind(
            grid,
            (*sizes, tile.chunks, float(spec.eps)),
            (shape.group_channels, *shape.flags, tile.rows, tile.channel_block),
            device=device,
            num_warps=config.FORWARD_WARPS,
        )

    def run(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output, laid out as the input, and statistics."""
        stream = _device.stream_here(self._shape.device.index)
        y, statistics = self._y(stream), self._new_statistics(stream)
        if self._whole is not None:
            self._whole(x, weight, bias, y, statistics, stream=stream)
            return y, statistics
        partials = self._partials(stream)
        self._measure(x, partials, stream=stream)
        self._statistics(partials, statistics, stream=stream)
        self._apply(x, weight, bias, statistics, y, stream=stream)
        return y, statistics

    def backward(self, param_grads: bool) -> BackwardPlan:
        """The plan for a gradient of the input's dtype and layout, made when it is first asked for."""
        plan = self._backward.get(param_grads)
        if plan is None:
            plan = self._backward[param_grads] = BackwardPlan(self._shape, param_grads)
        return plan


class BackwardPlan:
    """Launches of a backward pass: the input's gradient, then, where wanted, those of the parameters.

    A single launch where a program takes a whole group.
    """

    def __init__(self, shape: _Shape, param_grads: bool) -> None:
        (kernels, walks), spec, device = _kernels(), shape.spec, shape.device
        small, walk = shape.small("backward"), shape.walk("backward")
        self.spec = spec
        self.strides = shape.strides
        self._device = device
        self._dx = shape.like_input
        self._dweight, self._dbias = shape.like_parameters if param_grads else (None, None)
        self._param_grads = param_grads and (shape.has_weight or shape.has_bias)
        self._whole: BoundLaunch | None = None
        self._parameters: BoundLaunch | None = None
        all_images = False
        add_up = self._param_grads and spec.groups <= TICKETS and _device.facts(device).publishes_for_all
        sizes = (shape.images, shape.positions, shape.channels, spec.groups)
        self._scratch = shape.images * 2 * shape.channels
        if small is not None:
            elements = shape.images * small.position_block * small.channel_block
            all_images = self._param_grads and elements <= config.WHOLE_GROUP
            self._scratch = 0 if all_images else self._scratch
            blocks = (small.position_block, small.channel_block)
            self._whole = kernels.group_norm_backward_small.bind(
                ((1 if all_images else shape.images) * spec.groups,),
                (*sizes, float(spec.eps)),
                (shape.group_channels, *shape.flags, *blocks, all_images, add_up and not all_images),
                device=device,
                num_warps=small.num_warps,
            )
        elif walk is not None:
            blocks = (walk.position_block, walk.channel_block)
            self._whole = walks.group_norm_backward_walk.bind(
                (shape.images * spec.groups,),
                (*sizes, float(spec.eps)),
                (shape.group_channels, *shape.flags, *blocks, walk.stages, add_up),
                device=device,
                num_warps=walk.num_warps,
            )
        else:
            self._bind_tiles(shape)
            add_up = False
        if self._param_grads and not (add_up or all_images):
            image_block, channel_block = config.PARAMETER_BLOCK
            self._parameters = kernels.group_norm_parameter_gradients.bind(
                (-(-shape.channels // channel_block),),
                (shape.images, shape.channels),
                (shape.has_weight, shape.has_bias, image_block, channel_block),
                device=device,
                num_warps=config.SUM_WARPS,
            )

    def _bind_tiles(self, shape: _Shape) -> None:
        kernels, spec = _kernels()[0], shape.spec
        tile = config.tile_config(shape.positions, shape.channels, config.BACKWARD_TILE, shape.last)
        grid = (shape.images * tile.chunks, tile.channel_blocks)
        numbers = (shape.images, shape.positions, shape.channels, spec.groups, tile.chunks)
        constants = (shape.group_channels, *shape.flags, tile.rows, tile.channel_block)
        self._measure, self._apply = (
            kernel.bind(
                grid, (*numbers, float(spec.eps)), constants, device=self._device, num_warps=config.BACKWARD_WARPS
            )
            for kernel in (kernels.group_norm_measure_backward, kernels.group_norm_apply_backward)
        )
        self._sums = kernels.group_norm_sums.bind(
            (shape.images * spec.groups,),
            numbers,
            (shape.group_channels, shape.has_weight, config.CHUNK_BLOCK, shape.group_block),
            device=self._device,
            num_warps=config.SUM_WARPS,
        )
        scratch = self._scratch + shape.images * 2 * (spec.groups + tile.chunks * shape.channels)
        self._tile_scratch = maker((scratch,), torch.float32, shape.device)

    def run(
        self, dy: Tensor, x: Tensor, statistics: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of input, weight and bias; `dy` is laid out as the input, weight and bias are contiguous."""
        stream = _device.stream_here(self._device.index)
        dx = self._dx(stream)
        dweight = None if self._dweight is None else self._dweight(stream)
        dbias = None if self._dbias is None else self._dbias(stream)
        scratch = tickets = None
        if self._whole is not None:
            if self._scratch:
                scratch, tickets = partial_sums_on(stream, self._scratch, self._device)
            self._whole(x, dy, weight, bias, statistics, dx, scratch, tickets, dweight, dbias, stream=stream)
        else:
            scratch = self._tile_scratch(stream)  # too much of it to be kept
            self._measure(x, dy, weight, bias, statistics, scratch, stream=stream)
            self._sums(weight, scratch, stream=stream)
            self._apply(x, dy, weight, bias, statistics, scratch, dx, stream=stream)
        if self._parameters is not None:
            self._parameters(scratch, dweight, dbias, stream=stream)
        return dx, dweight, dbias


# Dtypes are part of the keys because a bound launch is for one set of them.
@functools.lru_cache(maxsize=4096)
def _forward_plan(input, spec, weight, bias, device, facts):
    return ForwardPlan(_Shape(input, spec, weight, bias, device))


@functools.lru_cache(maxsize=4096)
def _backward_plan(input, spec, weight, bias, dy_dtype, param_grads, device, facts):
    return BackwardPlan(_Shape(input, spec, weight, bias, device), param_grads)


def _kind(x: Tensor) -> _Dense:
    return _Dense(tuple(x.shape), x.stride(), channels_last(x), x.dtype)


def forward_plan(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: GroupNormSpec) -> ForwardPlan:
    """The plan for tensors like these, whose dtypes a bound launch depends on as well."""
    return _forward_plan(_kind(x), spec, like(weight), like(bias), x.device, _device.facts(x.device))


def triton_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: GroupNormSpec) -> tuple[Tensor, Tensor]:
    """Output and statistics of a dense input."""
    weight, bias = contiguous(weight), contiguous(bias)
    return forward_plan(x, weight, bias, spec).run(x, weight, bias)


def triton_backward(
    dy: Tensor,
    x: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: GroupNormSpec,
    param_grads: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias."""
    weight, bias = contiguous(weight), contiguous(bias)
    if dy.stride() != x.stride():
        dy = torch.empty_like(x, dtype=dy.dtype).copy_(dy)
    kinds = (_kind(x), spec, like(weight), like(bias), dy.dtype)
    plan = _backward_plan(*kinds, param_grads, x.device, _device.facts(x.device))
    return plan.run(dy, x, statistics, weight, bias)


def channels_last(tensor: Tensor) -> bool:
    """Whether a tensor is dense with its channels last in memory."""
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.movedim(1, -1).is_contiguous()


def dense(tensor: Tensor) -> Tensor:
    """The tensor as the kernels take it: contiguous in one of the two layouts."""
    if tensor.is_contiguous() or channels_last(tensor):
        return tensor
    if tensor.stride(1) == 1:
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    return tensor.contiguous()


def contiguous(parameter: Tensor | None) -> Tensor | None:
    """The parameter as the kernels take it."""
    return parameter if parameter is None or parameter.is_contiguous() else parameter.contiguous()
