"""Group norm with or without SiLU, of tensors that are contiguous or have their channels last in memory.

An input has `images` of `positions` in each of its `channels`. Statistics are float32 [images, groups, 2]: mean and
variance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import check_per_channel, check_tensors
from .._device import facts, next_power_of_2
from .._op import Op, laid_out_like
from .._partial_sums import TICKETS, partial_sums
from . import config, reference

kernels = _library.LazyModule(f"{__package__}.kernels")
kernels_walk = _library.LazyModule(f"{__package__}.kernels_walk")

ACTIVATIONS = ("", "silu", "swish")


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "",
) -> Tensor:
    """Group norm of `input` [N, C, ...] over `num_groups` groups of channels, then `activation` ("", silu or swish).

    Computed in float32 whatever the dtypes; the output has the input's dtype and layout.
    """
    check(input, num_groups, weight, bias, activation)
    arguments = (input, weight, bias, num_groups, eps, bool(activation))
    # Of nothing PyTorch's operator leaves gradients undefined.
    if not _library.runs_triton(FAMILY, input) and input.numel() != 0:
        return reference.torch_group_norm(*arguments)
    return GROUP_NORM(*arguments)


def check(input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, activation: str) -> None:
    """Raises for arguments that do not fit each other."""
    if not isinstance(input, Tensor):
        check_tensors(input=input)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is not known; '' (none), 'silu' and 'swish' are")
    if input.dim() < 2:
        raise ValueError(f"input has shape {list(input.shape)}; images and channels, [N, C, ...], are needed")
    if not input.is_floating_point():
        raise TypeError(f"group_norm needs a floating-point input, got {input.dtype}")
    channels = input.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"the {channels} channels of the input cannot be cut into num_groups={num_groups}")
    check_per_channel(input, channels, weight=weight, bias=bias)


def group_norm_forward(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor]:
    """Output and statistics, without autograd; the arguments were checked."""
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
    """Gradients of input, weight and bias, given the statistics of the forward pass."""
    if dy.shape != input.shape or dy.device != input.device:
        raise ValueError(
            f"the gradient has shape {list(dy.shape)} on {dy.device}, the input {list(input.shape)} on {input.device}"
        )
    expected = (input.shape[0], groups, 2)
    if tuple(statistics.shape) != expected or statistics.device != input.device:
        raise ValueError(
            f"the statistics have shape {list(statistics.shape)} on {statistics.device}, expected {list(expected)} on "
            f"{input.device}"
        )
    saved = (input, weight, bias, statistics.to(_library.compute_dtype(input)))
    wanted = (True, weight is not None, bias is not None)
    dx, dweight, dbias = GROUP_NORM.run_backward((dy,), saved, (groups, eps, silu), wanted)
    assert dx is not None
    return laid_out_like(input, dx), dweight, dbias


def _channels_last(tensor: Tensor) -> bool:
    """Whether a tensor is dense with its channels last in memory."""
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.movedim(1, -1).is_contiguous()


def _dense(tensor: Tensor) -> tuple[Tensor, bool]:
    """The tensor as the kernels take it, contiguous in one of two layouts, and whether its channels are last."""
    if _channels_last(tensor):
        return tensor, True
    if not tensor.is_contiguous() and tensor.stride(1) == 1:
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1), True
    return tensor.contiguous(), False


def launch_forward(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor]:
    """One launch where a program takes a whole group, three where groups are cut up."""
    x, last = _dense(input)
    images, channels = x.shape[:2]
    positions, group_channels = x.numel() // (images * channels), channels // groups
    y = torch.empty_like(x)
    statistics = torch.empty(images, groups, 2, dtype=torch.float32, device=x.device)
    given, sizes, epsilon = (x, weight, bias, y, statistics), (positions, channels, groups), (float(eps),)
    flags = _flags(weight, bias, group_channels, silu, last, group_channels if last else positions)
    apart = config.groups_apart(x.numel(), group_channels * x.itemsize, last)
    small = config.small_config(positions, group_channels, "forward") if apart else None
    if small is not None:
        kernels.group_norm_forward_small(
            (images * groups,),
            given,
            sizes,
            epsilon,
            **flags,
            S_BLOCK=small.position_block,
            D_BLOCK=small.channel_block,
            num_warps=small.num_warps,
        )
        return y, statistics
    walk = config.walk_config(images, positions, channels, group_channels, "forward") if apart else None
    if walk is not None:
        kernels_walk.group_norm_forward_walk(
            (images * groups,),
            given,
            sizes,
            epsilon,
            **flags,
            S_BLOCK=walk.position_block,
            D_BLOCK=walk.channel_block,
            STAGES=walk.stages,
            num_warps=walk.num_warps,
        )
        return y, statistics
    tile = config.tile_config(positions, channels, config.FORWARD_TILE[last], last)
    flags = _flags(weight, bias, group_channels, silu, last, channels if last else positions)
    grid = (images * tile.chunks, tile.channel_blocks)
    partials = torch.empty(images, tile.chunks, 2, channels, dtype=torch.float32, device=x.device)
    kernels.group_norm_measure(
        grid,
        (x, partials),
        (positions, channels, tile.chunks),
        LAST=last,
        ALIGN=flags["ALIGN"],
        R=tile.rows,
        C_BLOCK=tile.channel_block,
        num_warps=config.FORWARD_WARPS,
    )
    kernels.group_norm_statistics(
        (images * groups,),
        (partials, statistics),
        (*sizes, tile.chunks),
        D=group_channels,
        R=tile.rows,
        CHUNK_BLOCK=config.CHUNK_BLOCK,
        D_BLOCK=next_power_of_2(group_channels),
        num_warps=config.SUM_WARPS,
    )
    kernels.group_norm_apply(
        grid,
        (x, weight, bias, statistics, y),
        (*sizes, tile.chunks),
        epsilon,
        **flags,
        R=tile.rows,
        C_BLOCK=tile.channel_block,
        num_warps=config.FORWARD_WARPS,
    )
    return y, statistics


def launch_backward(
    dy: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    groups: int,
    eps: float,
    silu: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias, the latter two where wanted; one launch where it can do it all."""
    x, last = _dense(input)
    if dy.stride() != x.stride():
        dy = torch.empty_like(x, dtype=dy.dtype).copy_(dy)
    images, channels = x.shape[:2]
    positions, group_channels = x.numel() // (images * channels), channels // groups
    param_grads = (wanted[1] or wanted[2]) and (weight is not None or bias is not None)
    dx = torch.empty_like(x)
    dweight = torch.empty_like(weight) if param_grads and weight is not None else None
    dbias = torch.empty_like(bias) if param_grads and bias is not None else None
    # Programs of different images add up what they found, if there is a ticket for every group.
    add_up = param_grads and groups <= TICKETS and facts(x.device).publishes_for_all
    sizes, epsilon = (images, positions, channels, groups), (float(eps),)
    flags = _flags(weight, bias, group_channels, silu, last, group_channels if last else positions)
    apart = config.groups_apart(x.numel(), group_channels * x.itemsize, last)
    small = config.small_config(positions, group_channels, "backward") if apart else None
    walk = config.walk_config(images, positions, channels, group_channels, "backward") if apart else None
    scratch = tickets = None
    elements = images * 2 * channels
    if small is not None:
        whole = param_grads and config.whole_groups(images, small)
        if not whole:
            scratch, tickets = partial_sums(elements, x.device)
        kernels.group_norm_backward_small(
            ((1 if whole else images) * groups,),
            (x, dy, weight, bias, statistics, dx, scratch, tickets, dweight, dbias),
            sizes,
            epsilon,
            **flags,
            S_BLOCK=small.position_block,
            D_BLOCK=small.channel_block,
            WHOLE=whole,
            ADD_UP=add_up and not whole,
            num_warps=small.num_warps,
        )
        add_up = add_up or whole
    elif walk is not None:
        scratch, tickets = partial_sums(elements, x.device)
        kernels_walk.group_norm_backward_walk(
            (images * groups,),
            (x, dy, weight, bias, statistics, dx, scratch, tickets, dweight, dbias),
            sizes,
            epsilon,
            **flags,
            S_BLOCK=walk.position_block,
            D_BLOCK=walk.channel_block,
            STAGES=walk.stages,
            ADD_UP=add_up,
            num_warps=walk.num_warps,
        )
    else:
        add_up = False
        tile = config.tile_config(positions, channels, config.BACKWARD_TILE, last)
        flags = _flags(weight, bias, group_channels, silu, last, channels if last else positions)
        grid = (images * tile.chunks, tile.channel_blocks)
        # Too much of it to be kept.
        elements += images * 2 * (groups + tile.chunks * channels)
        scratch = torch.empty(elements, dtype=torch.float32, device=x.device)
        given, blocks = (x, dy, weight, bias, statistics, scratch), {"R": tile.rows, "C_BLOCK": tile.channel_block}
        kernels.group_norm_measure_backward(
            grid, given, (*sizes, tile.chunks), epsilon, **flags, **blocks, num_warps=config.BACKWARD_WARPS
        )
        kernels.group_norm_sums(
            (images * groups,),
            (scratch, weight),
            (*sizes, tile.chunks),
            D=group_channels,
            HAS_WEIGHT=weight is not None,
            CHUNK_BLOCK=config.CHUNK_BLOCK,
            D_BLOCK=next_power_of_2(group_channels),
            num_warps=config.SUM_WARPS,
        )
        kernels.group_norm_apply_backward(
            grid, (*given, dx), (*sizes, tile.chunks), epsilon, **flags, **blocks, num_warps=config.BACKWARD_WARPS
        )
    if param_grads and not add_up:
        image_block, channel_block = config.PARAMETER_BLOCK
        kernels.group_norm_parameter_gradients(
            (-(-channels // channel_block),),
            (scratch, dweight, dbias),
            (images, channels),
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            N_BLOCK=image_block,
            C_BLOCK=channel_block,
            num_warps=config.SUM_WARPS,
        )
    return dx, dweight, dbias


def _flags(
    weight: Tensor | None, bias: Tensor | None, group_channels: int, silu: bool, last: bool, contiguous: int
) -> dict[str, Any]:
    """The constants that most kernels share, for runs of `contiguous` elements in memory."""
    return {
        "D": group_channels,
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
        "SILU": silu,
        "LAST": last,
        "ALIGN": math.gcd(contiguous, 16),
    }


def _fake(input, weight, bias, groups, eps, silu):  # type: ignore[no-untyped-def]
    statistics = input.new_empty((input.shape[0], groups, 2), dtype=_library.compute_dtype(input))
    return torch.empty_like(input), statistics


FAMILY = _library.register_family(_library.OpFamily("group_norm", "group norm in both layouts, with SiLU"))


def _check_case(groups: int, *shape: int) -> dict[str, Any]:
    def image(generator: torch.Generator) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return values.to(memory_format=torch.channels_last)

    def positive(generator: torch.Generator) -> Tensor:
        return torch.rand(shape[1], generator=generator, dtype=torch.float32, device="cpu") + 0.5

    return {"input": image, "weight": positive, "bias": positive, "groups": groups, "eps": 1e-5, "silu": True}


GROUP_NORM = Op(
    FAMILY,
    "group_norm(Tensor input, Tensor? weight, Tensor? bias, int groups, float eps, bool silu) "
    "-> (Tensor output, Tensor statistics)",
    reference=reference.forward,
    forward=launch_forward,
    backward=launch_backward,
    fake=_fake,
    saves=("input", "weight", "bias", "statistics"),
    strided=("input", "output"),
    same_layout=("input", "output"),
    # One program takes a group of the first, several that of the second.
    checks=[_check_case(6, 2, 60, 5, 7), _check_case(3, 2, 24, 70, 70)],
)
