"""Group norm with or without SiLU, of tensors that are contiguous or have their channels last in memory.

An input has `images` of `positions` in each of its `channels`. Statistics are float32 [images, groups, 2]: mean and
variance.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _library
from .._checks import check_parameters, check_shape, check_tensors
from .._device import DeviceFacts, empty_on, facts, launch_rule, next_power_of_2
from .._op import Kernels, Memory, Op, Saved, laid_out_like
from .._tickets import TICKETS, tickets_on
from . import config, reference

kernels = _library.LazyModule(f"{__package__}.kernels")

ACTIVATIONS = ("", "silu", "swish")
# Positions of an image are 32-bit in the kernels.
MOST_POSITIONS = 2**31 - 2**16


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "",
) -> Tensor:
    """Return the group norm of `input` [N, C, ...] over `num_groups` groups of channels, then `activation`.

    `activation` is "", "silu" or "swish". Computed in float32 for all dtypes; the output has the input's dtype and
    layout.
    """
    check(input, num_groups, weight, bias, activation)
    arguments = (input, weight, bias, num_groups, eps, bool(activation))
    output = GROUP_NORM.with_kernels(arguments)
    if output is not None:
        return output
    # For an empty input PyTorch's operator leaves gradients undefined.
    if not _library.runs_triton(FAMILY, input) and input.numel() != 0:
        return reference.torch_group_norm(*arguments)
    return GROUP_NORM(*arguments)


def check(input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, activation: str) -> None:
    """Raise for arguments that do not fit together."""
    if not isinstance(input, Tensor):
        check_tensors(input=input)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is not known; '' (none), 'silu' and 'swish' are")
    if input.dim() < 2:
        raise ValueError(f"input has shape {list(input.shape)}; images and channels, [N, C, ...], are needed")
    if not input.dtype.is_floating_point:
        raise TypeError(f"group_norm needs a floating-point input, got {input.dtype}")
    channels = input.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"the {channels} channels of the input cannot be cut into num_groups={num_groups}")
    check_parameters(input, (channels,), weight=weight, bias=bias)


def group_norm_forward(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor]:
    """Return output and statistics, without autograd. The caller has checked the arguments."""
    output, statistics = GROUP_NORM.run(input, weight, bias, groups, eps, silu)
    assert output is not None
    assert statistics is not None
    return laid_out_like(input, output), statistics


def group_norm_backward(
    dy: Tensor,
    input: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias, given the statistics of the forward pass."""
    check_shape("the gradient", dy, input.shape, input.device)
    check_shape("statistics", statistics, (input.shape[0], groups, 2), input.device)
    saved = (input, weight, bias, statistics.to(_library.compute_dtype(input)))
    wanted = (True, weight is not None, bias is not None)
    dx, dweight, dbias = GROUP_NORM.run_backward((dy,), saved, (groups, eps, silu), wanted)
    assert dx is not None
    return laid_out_like(input, dx), dweight, dbias


def _channels_last(tensor: Tensor) -> bool:
    """Return whether a tensor is dense with its channels last in memory."""
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.movedim(1, -1).is_contiguous()


def _dense(tensor: Tensor) -> tuple[Tensor, bool]:
    """Return the tensor contiguous in one of the kernels' two layouts, and whether its channels are last."""
    if _channels_last(tensor):
        return tensor, True
    if not tensor.is_contiguous() and tensor.stride(1) == 1:
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1), True
    return tensor.contiguous(), False


def launch_forward(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor]:
    """Return output and statistics: by one launch if a program takes a whole group, by three if groups are cut up."""
    x, last = _dense(input)
    device, dtype, shape = x.device, x.dtype, tuple(x.shape)
    dtypes = (dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    launches, elements = _forward_launches(shape, groups, dtypes, last, silu, device)
    empty = empty_on(device)
    y = empty(shape, x.stride(), dtype)
    statistics = empty((shape[0], groups, 2), (2 * groups, 2, 1), torch.float32)
    if not elements:
        launches[0]((x, weight, bias, y, statistics), (eps,))
        return y, statistics
    measure, add_up, apply = launches
    partials = torch.empty(elements, dtype=torch.float32, device=device)
    measure((x, partials))
    add_up((partials, statistics))
    apply((x, weight, bias, statistics, y), (eps,))
    return y, statistics


def _constants(group_channels: int, last: bool, silu: bool, contiguous: int) -> dict[str, Any]:
    """Return the constants of the kernels; loads may be as wide as the alignment of `contiguous`."""
    return {"D": group_channels, "SILU": silu, "LAST": last, "ALIGN": math.gcd(contiguous, 16)}


def _prepare_held(
    kernel: Any, sizes: tuple[int, ...], chosen: config.GroupConfig, last: bool, silu: bool, **constants: Any
) -> Any:
    """Prepare a kernel with one program for each group of an image."""
    images, positions, channels, groups = sizes
    group_channels = channels // groups
    return kernel.prepare(
        (images * groups,),
        sizes,
        **_constants(group_channels, last, silu, group_channels if last else positions),
        **constants,
        S_BLOCK=chosen.position_block,
        D_BLOCK=chosen.channel_block,
        num_warps=chosen.num_warps,
    )


def _held_config(
    sizes: tuple[int, ...], itemsize: int, last: bool, direction: str, device: DeviceFacts
) -> config.GroupConfig | None:
    """Return the configuration for one program per whole group; None if groups are cut up."""
    images, positions, channels, groups = sizes
    group_channels = channels // groups
    if not config.groups_apart(images * positions * channels, group_channels * itemsize, last):
        return None
    if direction == "forward" and not config.held_forward(positions, group_channels, last):
        return None
    return config.small_config(positions, group_channels, direction, itemsize, device)


@launch_rule
def _forward_launches(
    shape: tuple[int, ...], groups: int, dtypes: tuple[Any, ...], last: bool, silu: bool, on: torch.device
) -> tuple[tuple[Any, ...], int]:
    """Return the prepared kernels, one or three, and the elements of memory that three need for partial results."""
    images, positions, channels, groups = sizes = _sizes(shape, groups)
    itemsize, device, group_channels = dtypes[0].itemsize, facts(on), channels // groups
    chosen = _held_config(sizes, itemsize, last, "forward", device)
    if chosen is not None:
        return (_prepare_held(kernels.group_norm_forward_small, sizes, chosen, last, silu),), 0
    tile, shared = _tiles(sizes, itemsize, last, "forward", device)
    constants = _constants(group_channels, last, silu, channels if last else positions)
    layout = {"LAST": last, "ALIGN": constants["ALIGN"]}
    grid, others = (images * tile.chunks, tile.channel_blocks), (*sizes[1:], tile.chunks)
    measure = kernels.group_norm_measure.prepare(grid, (positions, channels, tile.chunks), **layout, **shared)
    add_up = kernels.group_norm_statistics.prepare((images * groups,), others, R=tile.rows, **_adding(group_channels))
    apply = kernels.group_norm_apply.prepare(grid, others, **constants, **shared)
    return (measure, add_up, apply), images * tile.chunks * 2 * channels


def _sizes(shape: tuple[int, ...], groups: int) -> tuple[int, ...]:
    """Return images, positions of each, channels and groups; raise if positions exceed 32-bit numbers."""
    positions = math.prod(shape[2:])
    if positions > MOST_POSITIONS:
        raise ValueError(f"{positions} positions of an image are too many for the kernels; APEX_IMPL=torch takes them")
    return shape[0], positions, shape[1], groups


def _tiles(
    sizes: tuple[int, ...], itemsize: int, last: bool, direction: str, device: DeviceFacts
) -> tuple[config.TileConfig, dict[str, int]]:
    """Return the tiles of groups that are cut up, and the constants that kernels for a tile share."""
    images, positions, channels, _ = sizes
    chosen = config.cut_config(images, positions, channels, last, direction, itemsize, device)
    tile = config.tile_config(positions, channels, chosen.elements, last)
    return tile, {"R": tile.rows, "C_BLOCK": tile.channel_block, "num_warps": chosen.num_warps}


def _adding(group_channels: int) -> dict[str, int]:
    """Return the constants that the kernels that combine tiles share."""
    blocks = {"CHUNK_BLOCK": config.CHUNK_BLOCK, "D_BLOCK": next_power_of_2(group_channels)}
    return {"D": group_channels, **blocks, "num_warps": config.SUM_WARPS}


def launch_backward(dy: Tensor, *saved: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias, the latter two if wanted; by one launch if possible.

    `saved` is the saved tensors of `GROUP_NORM`, its settings and `wanted`.
    """
    input, weight, bias, statistics, groups, eps, silu, wanted = saved
    x, last = _dense(input)
    device, dtype, shape, strides = x.device, x.dtype, tuple(x.shape), x.stride()
    if dy.stride() != strides:
        dy = torch.empty_like(x, dtype=dy.dtype).copy_(dy)
    param_grads = (wanted[1] or wanted[2]) and (weight is not None or bias is not None)
    of_weight, of_bias = None if weight is None else weight.dtype, None if bias is None else bias.dtype
    dtypes = (dtype, dy.dtype, of_weight, of_bias, statistics.dtype)
    launches = _backward_launches(shape, groups, dtypes, last, silu, param_grads, device)
    empty, channels = empty_on(device), shape[1:2]
    dx = empty(shape, strides, dtype)
    dweight = empty(channels, (1,), of_weight) if param_grads and of_weight is not None else None
    dbias = empty(channels, (1,), of_bias) if param_grads and of_bias is not None else None
    tensors = (x, dy, weight, bias, statistics)
    scratch = empty((launches.scratch,), (1,), torch.float32)
    if launches.held is not None:
        launches.held((*tensors, dx, scratch, tickets_on(device), dweight, dbias), (eps,))
    else:
        of_tile, add_up = launches.cut
        of_tile((*tensors, scratch, None), (eps,))
        add_up((scratch, weight))
        of_tile((*tensors, scratch, dx), (eps,))
    if launches.parameters is not None:
        launches.parameters((scratch, dweight, dbias))
    return dx, dweight, dbias


class BackwardLaunches(NamedTuple):
    """The prepared kernels of a backward pass, without their tensors: `held` for whole groups, or `cut` for tiles."""

    scratch: int  # elements of memory for partial sums
    held: Any = None
    cut: tuple[Any, ...] = ()
    parameters: Any = None  # launched last, for the gradients of weight and bias


@launch_rule
def _backward_launches(
    shape: tuple[int, ...], groups: int, dtypes: tuple, last: bool, silu: bool, param_grads: bool, on: torch.device
) -> BackwardLaunches:
    images, positions, channels, groups = sizes = _sizes(shape, groups)
    itemsize, device, group_channels = dtypes[0].itemsize, facts(on), channels // groups
    image_block, channel_block = config.PARAMETER_BLOCK
    parameters = kernels.group_norm_parameter_gradients.prepare(
        (-(-channels // channel_block),),
        (images, channels),
        N_BLOCK=image_block,
        C_BLOCK=channel_block,
        num_warps=config.SUM_WARPS,
    )
    elements = images * 2 * channels
    chosen = _held_config(sizes, itemsize, last, "backward", device)
    if chosen is not None:
        # The last program of each group adds up parameter gradients over images, if every group has an arrival counter.
        add_up = param_grads and groups <= TICKETS and device.publishes_for_all
        held = _prepare_held(kernels.group_norm_backward_small, sizes, chosen, last, silu, ADD_UP=add_up)
        return BackwardLaunches(elements, held, parameters=parameters if param_grads and not add_up else None)
    tile, shared = _tiles(sizes, itemsize, last, "backward", device)
    constants = {**_constants(group_channels, last, silu, channels if last else positions), **shared}
    grid, sizes = (images * tile.chunks, tile.channel_blocks), (*sizes, tile.chunks)
    of_tile = kernels.group_norm_backward_tile.prepare(grid, sizes, **constants)
    sums = kernels.group_norm_sums.prepare((images * groups,), sizes, **_adding(group_channels))
    elements += images * 2 * (groups + tile.chunks * channels)
    return BackwardLaunches(elements, cut=(of_tile, sums), parameters=parameters if param_grads else None)


def _fake(input, weight, bias, groups, eps, silu):  # type: ignore[no-untyped-def]
    statistics = input.new_empty((input.shape[0], groups, 2), dtype=_library.compute_dtype(input))
    return torch.empty_like(input), statistics


FAMILY = _library.register_family(_library.OpFamily("group_norm", "group norm in both layouts, with SiLU"))


GROUP_NORM = Op(
    FAMILY,
    "group_norm(Tensor input, Tensor? weight, Tensor? bias, int groups, float eps, bool silu) "
    "-> (Tensor output, Tensor statistics)",
    reference=reference.forward,
    kernels=Kernels(launch_forward, launch_backward),
    shapes=_fake,
    saved=Saved("input", "weight", "bias", "statistics"),
    memory=Memory(strided=("input", "output"), same_as_first=("input", "output")),
)
