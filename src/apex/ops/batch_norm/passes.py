"""The passes of a batch norm over one process or several, without autograd: kernels or PyTorch's operators.

Forward there are two, `statistics` and `normalise`, and backward two, `gradient_sums` and `input_gradient`. In between,
the ranks of a group exchange their rank statistics, [2C + 1] values: forward means, sums of squared deviations and the
number of values per channel, which are gathered; backward `sum_dy`, `sum_dy_xhat` and that number, which are added up.
Statistics are mean and biased variance of every channel, in float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import _library
from .._device import DeviceFacts, facts, launch_rule
from .._partial_sums import partial_sums
from .._tolerance import excess
from . import config, reference
from .reference import BatchNormSpec, Channels, GradientSums

kernels = _library.LazyModule(f"{__package__}.kernels")


class Exchange(Protocol):
    """How the ranks of a group exchange rank statistics; None stands for a process by itself."""

    @property
    def averaged_ranks(self) -> int:
        """The ranks over which gradients of weight and bias are averaged; 0 where they are those of this rank alone."""

    def gather(self, rank_stats: Tensor) -> Tensor:
        """The rank statistics of all ranks, [P, 2C + 1]."""

    def add_up(self, rank_stats: Tensor) -> object:
        """Makes rank statistics the sum of those of all ranks, in place."""


def statistics(
    input: Tensor,
    spec: BatchNormSpec,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    exchange: Exchange | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel over all ranks, towards which running statistics move.

    Nothing waits for the device.
    """
    running = (running_mean, running_var)
    if exchange is None and _takes_kernels(input):
        if torch.compiler.is_compiling():
            flags = (spec.momentum, spec.channel_dim)
            return torch.ops.apex.batch_norm_statistics(input.detach(), *running, *flags)
        return launch_statistics(input, spec, *running)
    rank_stats = rank_statistics(input.detach(), spec.channel_dim)
    all_ranks = rank_stats[None] if exchange is None else exchange.gather(rank_stats)
    if torch.compiler.is_compiling() or not _takes_kernels(all_ranks):
        return reference.combine(all_ranks, *running, spec.momentum)
    ranks, pitch = all_ranks.shape
    return _combine(all_ranks, ranks, pitch // 2, pitch, *running, spec.momentum)


def launch_statistics(
    input: Tensor, spec: BatchNormSpec, running_mean: Tensor | None, running_var: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`statistics` of one process by kernels."""
    return _combine(*_measure(input, spec.channel_dim), running_mean, running_var, spec.momentum)


def rank_statistics(input: Tensor, channel_dim: int) -> Tensor:
    """[2C + 1]: means, sums of squared deviations and number of values per channel of an input that may be empty."""
    if not _takes_kernels(input):
        return reference.rank_statistics(input, channel_dim)
    if torch.compiler.is_compiling():
        return torch.ops.apex.batch_norm_rank_statistics(input, channel_dim)
    partials, programs, channels, pitch = _measure(input, channel_dim)
    rank_stats = torch.empty(2 * channels + 1, dtype=torch.float32, device=input.device)
    _launch_statistics(partials, rank_stats, None, None, None, programs, channels, pitch, 0.0)
    return rank_stats


def _measure(input: Tensor, channel_dim: int) -> tuple[Tensor, int, int, int]:
    """Statistics of parts of an input: `partials`, how many parts, the channels, and how far parts lie apart."""
    x, geometry = _dense(input, channel_dim)
    device = x.device
    launch, programs, pitch = _measure_launch(geometry, x.dtype.itemsize, facts(device))
    partials, _ = partial_sums(programs * pitch, device, tickets=False)
    launch((x, partials))
    return partials, programs, geometry.channels, pitch


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
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of a whole from the statistics of its parts, towards which running ones move."""
    mean = torch.empty(channels, dtype=torch.float32, device=partials.device)
    variance = torch.empty_like(mean)
    places = (_contiguous(running_mean), _contiguous(running_var))
    _launch_statistics(partials, mean, variance, *places, parts, channels, pitch, momentum)
    if places[0] is not running_mean:
        running_mean.copy_(places[0])  # type: ignore[union-attr, arg-type]
    if places[1] is not running_var:
        running_var.copy_(places[1])  # type: ignore[union-attr, arg-type]
    return mean, variance


def _launch_statistics(partials, mean, variance, running_mean, running_var, parts, channels, pitch, momentum):  # type: ignore[no-untyped-def]
    launch = _statistics_launch(parts, channels, pitch, running_mean is not None, variance is None)
    launch((partials, mean, variance, running_mean, running_var), (momentum,))


@launch_rule
def _statistics_launch(parts: int, channels: int, pitch: int, running: bool, rank_stats: bool) -> Any:
    part_block, channel_block = config.finish_block(parts)
    return kernels.batch_norm_statistics.prepare(
        (-(-channels // channel_block),),
        (parts, channels, pitch),
        RUNNING=running,
        RANK_STATS=rank_stats,
        P_BLOCK=part_block,
        C_BLOCK=channel_block,
        num_warps=config.FINISH_WARPS,
    )


def normalise(input: Tensor, z: Tensor | None, channels: Channels, spec: BatchNormSpec) -> Tensor:
    """The output, given mean and variance of every channel: those of a batch or running ones.

    torch.compile sees PyTorch's operators: it joins them with what makes the addend, a norm of its own in a ResNet.
    """
    return (launch_normalise if launches(input) else reference.normalise)(input, z, channels, spec)


def launch_normalise(input: Tensor, z: Tensor | None, channels: Channels, spec: BatchNormSpec) -> Tensor:
    """The output by a kernel."""
    x, geometry = _dense(input, spec.channel_dim)
    y, parameters = torch.empty_like(x), _kernel_channels(channels)
    given = (z is not None, parameters[0] is not None, parameters[1] is not None)
    launch = _apply_launch(geometry, x.dtype.itemsize, *given, spec.relu, facts(x.device))
    launch((x, _like(x, z), *parameters, y), (spec.eps,))
    return y


@launch_rule
def _apply_launch(
    geometry: config.Geometry,
    itemsize: int,
    has_z: bool,
    has_weight: bool,
    has_bias: bool,
    relu: bool,
    device: DeviceFacts,
) -> Any:
    chosen = config.apply_config(*geometry, False, itemsize, device)
    tiles = config.tiling(geometry, chosen.elements)
    return kernels.batch_norm_apply.prepare(
        (tiles.units * tiles.channel_blocks,),
        tiles.sizes,
        HAS_Z=has_z,
        HAS_WEIGHT=has_weight,
        HAS_BIAS=has_bias,
        RELU=relu,
        **tiles.constants,
        num_warps=chosen.num_warps,
    )


def gradient_sums(
    dy: Tensor,
    input: Tensor,
    output: Tensor | None,
    channels: Channels,
    spec: BatchNormSpec,
    *,
    keep_dz: bool = False,
    for_ranks: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """The addend's gradient with `keep_dz`, `sum_dy`, `sum_dy_xhat`, and the rank statistics of both `for_ranks`.

    The addend's gradient is `dy` behind the ReLU mask. The sums are the gradients of bias and weight.
    """
    write_dz = keep_dz and spec.relu
    if not _takes_kernels(input):
        dz, sum_dy, sum_dy_xhat = reference.gradient_sums(dy, input, output, channels, spec)
    elif torch.compiler.is_compiling():
        dz = dy
        if write_dz:
            # In PyTorch's operators: they are joined with those that add up the gradients of the output's readers.
            # as_strided makes Inductor keep the result, which it would compute again for everything that takes it.
            dz = reference.masked(dy, input, output, channels, spec)
            dz, output, spec = dz.as_strided(dz.shape, dz.stride()), None, reference.without_relu(spec)
        flags = (spec.eps, spec.relu, spec.channel_dim)
        sum_dy, sum_dy_xhat = torch.ops.apex.batch_norm_gradient_sums(dz, input, output, *channels, *flags)
    else:
        return launch_sums(laid_out(dy, input, output, channels, spec), spec, keep_dz, for_ranks)
    rank_stats = (
        torch.cat((sum_dy, sum_dy_xhat, sum_dy.new_full((1,), values_per_channel(input, spec.channel_dim))))
        if for_ranks
        else None
    )
    return dz if keep_dz else None, sum_dy, sum_dy_xhat, rank_stats


class Backward(NamedTuple):
    """What the kernels of a backward pass take: tensors laid out like the dense input `x`, channels in their order."""

    x: Tensor
    dy: Tensor
    output: Tensor | None
    channels: tuple[Tensor | None, ...]
    geometry: config.Geometry
    device: DeviceFacts


def laid_out(dy: Tensor, input: Tensor, output: Tensor | None, channels: Channels, spec: BatchNormSpec) -> Backward:
    x, geometry = _dense(input, spec.channel_dim)
    return Backward(x, _like(x, dy), _like(x, output), _kernel_channels(channels), geometry, facts(x.device))


def launch_sums(
    given: Backward, spec: BatchNormSpec, keep_dz: bool, for_ranks: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """The results of `gradient_sums`."""
    x, dy, output, channels, geometry, facts_here = given
    device, count, write_dz = x.device, geometry.channels, keep_dz and spec.relu
    flags = (channels[0] is not None, channels[1] is not None, _mask(spec, output), write_dz)
    measure, add_up, programs = _sums_launches(geometry, dy.dtype.itemsize, for_ranks, *flags, facts_here)
    dz = torch.empty_like(dy) if write_dz else None
    sum_dy = torch.empty(count, dtype=torch.float32, device=device)
    sum_dy_xhat = torch.empty_like(sum_dy)
    rank_stats = torch.empty(2 * count + 1, dtype=torch.float32, device=device) if for_ranks else None
    partials, _ = partial_sums(programs * 2 * count, device, tickets=False)
    measure((x, dy, output, *channels, dz, partials), (spec.eps,))
    add_up((partials, sum_dy, sum_dy_xhat, rank_stats), (geometry.images * geometry.positions,))
    return dy if keep_dz and not spec.relu else dz, sum_dy, sum_dy_xhat, rank_stats


@launch_rule
def _sums_launches(
    geometry: config.Geometry,
    itemsize: int,
    for_ranks: bool,
    has_weight: bool,
    has_bias: bool,
    mask: int,
    write_dz: bool,
    device: DeviceFacts,
) -> tuple[Any, Any, int]:
    """The kernel that sums parts of the gradients, the one that adds these up, and the number of parts."""
    pace = config.pace(*geometry, True, itemsize, device)
    tiles = config.tiling(geometry, pace.elements)
    programs = config.measure_programs(tiles.units, tiles.channel_blocks, device.multiprocessors, pace)
    measure = kernels.batch_norm_measure_backward.prepare(
        (programs * tiles.channel_blocks,),
        (*tiles.sizes, programs),
        HAS_WEIGHT=has_weight,
        HAS_BIAS=has_bias,
        MASK=mask,
        WRITE_DZ=write_dz,
        **tiles.constants,
        UNROLL=pace.unroll,
        num_warps=pace.num_warps,
    )
    part_block, channel_block = config.finish_block(programs)
    add_up = kernels.batch_norm_sums.prepare(
        (-(-geometry.channels // channel_block),),
        (programs, geometry.channels),
        RANK_STATS=for_ranks,
        P_BLOCK=part_block,
        C_BLOCK=channel_block,
        num_warps=config.FINISH_WARPS,
    )
    return measure, add_up, programs


def input_gradient(
    dy: Tensor, input: Tensor, output: Tensor | None, channels: Channels, sums: GradientSums, spec: BatchNormSpec
) -> Tensor:
    """The input's gradient."""
    if not _takes_kernels(input):
        return reference.input_gradient(dy, input, output, channels, sums, spec)
    if torch.compiler.is_compiling():
        flags = (spec.eps, spec.training, spec.relu, spec.channel_dim)
        return torch.ops.apex.batch_norm_input_gradient(dy, input, output, *channels, *sums, *flags)
    return launch_input_gradient(laid_out(dy, input, output, channels, spec), sums, spec)


def launch_input_gradient(given: Backward, sums: GradientSums, spec: BatchNormSpec) -> Tensor:
    """The input's gradient, by a kernel."""
    x, dy, output, channels, geometry, device = given
    sum_dy, sum_dy_xhat, inverse_count = sums
    dx = torch.empty_like(x)
    flags = (sum_dy_xhat is None, channels[0] is not None, channels[1] is not None, _mask(spec, output))
    launch = _apply_backward_launch(geometry, x.dtype.itemsize, *flags, spec.training, device)
    launch((x, dy, output, *channels, sum_dy.contiguous(), _contiguous(sum_dy_xhat), dx), (spec.eps, inverse_count))
    return dx


@launch_rule
def _apply_backward_launch(
    geometry: config.Geometry,
    itemsize: int,
    rank_stats: bool,
    has_weight: bool,
    has_bias: bool,
    mask: int,
    training: bool,
    device: DeviceFacts,
) -> Any:
    chosen = config.apply_config(*geometry, True, itemsize, device)
    tiles = config.tiling(geometry, chosen.elements)
    return kernels.batch_norm_apply_backward.prepare(
        (tiles.units * tiles.channel_blocks,),
        tiles.sizes,
        HAS_WEIGHT=has_weight,
        HAS_BIAS=has_bias,
        MASK=mask,
        BATCH=training,
        RANK_STATS=rank_stats,
        **tiles.constants,
        num_warps=chosen.num_warps,
    )


def _mask(spec: BatchNormSpec, output: Tensor | None) -> int:
    """Where kernels take ReLU's mask from: 0 there is none, 1 the input again, 2 the output."""
    return 0 if not spec.relu else 1 if output is None else 2


def _takes_kernels(input: Tensor) -> bool:
    """Whether a pass runs as a kernel; how large the input is does not matter here."""
    return input.numel() > 0 and _library.runs_triton(FAMILY, input)


def launches(input: Tensor) -> bool:
    """Whether the passes launch kernels: not while a graph is compiled, which gets operators."""
    return _takes_kernels(input) and not torch.compiler.is_compiling()


def values_per_channel(input: Tensor, channel_dim: int) -> int:
    """How many values are normalised together in this process."""
    return input.numel() // max(1, input.shape[channel_dim])


def _dense(tensor: Tensor, channel_dim: int) -> tuple[Tensor, config.Geometry]:
    """The tensor as the kernels take it, contiguous in one of the two layouts, and how it lies in memory."""
    shape, contiguous = tensor.shape, tensor.is_contiguous()
    images, channels = shape[0], shape[channel_dim]
    count = tensor.numel() // channels
    if channel_dim == 1 and not contiguous and tensor.stride(1) == 1:
        if len(shape) != 4 or not tensor.is_contiguous(memory_format=torch.channels_last):
            tensor = tensor.movedim(1, -1).contiguous().movedim(-1, 1)
        return tensor, config.Geometry(1, count, channels, True)
    if channel_dim == -1 or count == images:
        return tensor.contiguous(), config.Geometry(1, count, channels, True)
    return tensor.contiguous(), config.Geometry(images, count // images, channels, False)


def _like(x: Tensor, tensor: Tensor | None) -> Any:
    """`tensor` in the memory layout of the dense `x`, its own dtype kept."""
    if tensor is None or tensor.stride() == x.stride():
        return tensor
    return torch.empty_like(x, dtype=tensor.dtype).copy_(tensor)


def _contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _kernel_channels(channels: Channels) -> tuple[Tensor | None, ...]:
    """Weight, bias, mean and variance, in the order of the kernels."""
    mean, variance, weight, bias = channels
    return _contiguous(weight), _contiguous(bias), mean.contiguous(), variance.contiguous()


def self_check(device: torch.device) -> float:
    """Largest error, as a multiple of its tolerance, forward and backward, in three dtypes and both layouts."""
    shape, spec, worst = (3, 72, 9, 7), BatchNormSpec(relu=True), 0.0
    generator = torch.Generator(device="cpu").manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for layout in (torch.channels_last, torch.contiguous_format):
            images = [torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for _ in range(3)]
            x, z, dy = (image.to(dtype).to(memory_format=layout) for image in images)
            weight, bias = (torch.rand(72, generator=generator, dtype=torch.float32, device="cpu") + 0.5 for _ in "wb")
            for addend in (z, None):
                worst = max(worst, _largest_error((x, addend, dy, weight, bias), spec, device))
    return worst


def _largest_error(tensors: tuple[Tensor | None, ...], spec: BatchNormSpec, device: torch.device) -> float:
    x, z, dy, weight, bias = _unless_none(tensors, lambda each: each.to(device))
    channels = Channels(*statistics(x, spec), weight, bias)
    y = normalise(x, z, channels, spec)
    dz, dbias, dweight, _ = gradient_sums(dy, x, None if z is None else y, channels, spec, keep_dz=z is not None)
    count = values_per_channel(x, spec.channel_dim)
    masked, plain = (dy, spec) if dz is None else (dz, reference.without_relu(spec))
    dx = input_gradient(masked, x, None, channels, GradientSums(dbias, dweight, 1 / count), plain)
    x, z, gradient, weight, bias = _unless_none(tensors, Tensor.double)
    exact = Channels(*reference.combine(reference.rank_statistics(x, spec.channel_dim)[None]), weight, bias)
    right = reference.gradients(gradient, x, y.cpu(), exact, spec)
    pairs = [(y, reference.normalise(x, z, exact, spec), 1), (dx, right[0], 1)]
    pairs += [(dweight, right[2], count), (dbias, right[3], count)] + ([] if dz is None else [(dz, right[1], 1)])
    return max(excess(actual.cpu(), wanted, reduction=terms) for actual, wanted, terms in pairs)


def _unless_none(tensors: tuple[Tensor | None, ...], change: Callable[[Tensor], Tensor]) -> Any:
    return [None if each is None else change(each) for each in tensors]


FAMILY = _library.register_family(
    _library.OpFamily(
        "batch_norm",
        "batch norm with an addend and ReLU, in both layouts",
        self_check,
        small_inputs=f"PyTorch's operators below {config.NATIVE_BELOW:,} elements, but for halves with an addend, and "
        "mostly without an addend or ReLU",
    )
)


# What torch.compile puts into a graph in place of launches. Results are laid out as PyTorch would lay out the input.
def _statistics(input, running_mean, running_var, momentum, channel_dim):  # type: ignore[no-untyped-def]
    return statistics(input, BatchNormSpec(momentum=momentum, channel_dim=channel_dim), running_mean, running_var)


def _statistics_fake(input, *rest):  # type: ignore[no-untyped-def]
    mean = input.new_empty(input.shape[rest[-1]], dtype=_library.compute_dtype(input))
    return mean, torch.empty_like(mean)


def _gradient_sums(dy, input, output, *rest):  # type: ignore[no-untyped-def]
    *channels, eps, relu, channel_dim = rest
    spec = BatchNormSpec(eps, relu=relu, channel_dim=channel_dim)
    return gradient_sums(dy, input, output, Channels(*channels), spec)[1:3]


def _gradient_sums_fake(dy, input, output, mean, *_):  # type: ignore[no-untyped-def]
    sum_dy = torch.empty_like(mean, dtype=_library.compute_dtype(dy, input))
    return sum_dy, torch.empty_like(sum_dy)


def _input_gradient(dy, input, output, *rest):  # type: ignore[no-untyped-def]
    eps, training, relu, channel_dim = rest[-4:]
    spec = BatchNormSpec(eps, 0.0, training, relu, channel_dim)
    channels, sums = Channels(*rest[:4]), GradientSums(*rest[4:7])
    return _like(torch.empty_like(input), input_gradient(dy, input, output, channels, sums, spec))


_library.register_op(
    "batch_norm_rank_statistics(Tensor input, int channel_dim) -> Tensor",
    rank_statistics,
    lambda input, channel_dim: input.new_empty(2 * input.shape[channel_dim] + 1, dtype=_library.compute_dtype(input)),
)
_library.register_op(
    "batch_norm_statistics(Tensor input, Tensor(a!)? running_mean, Tensor(b!)? running_var, float momentum, "
    "int channel_dim) -> (Tensor, Tensor)",
    _statistics,
    _statistics_fake,
)
_library.register_op(
    "batch_norm_gradient_sums(Tensor dy, Tensor input, Tensor? output, Tensor mean, Tensor variance, Tensor? weight, "
    "Tensor? bias, float eps, bool relu, int channel_dim) -> (Tensor, Tensor)",
    _gradient_sums,
    _gradient_sums_fake,
)
_library.register_op(
    "batch_norm_input_gradient(Tensor dy, Tensor input, Tensor? output, Tensor mean, Tensor variance, Tensor? weight, "
    "Tensor? bias, Tensor sum_dy, Tensor? sum_dy_xhat, float inverse_count, float eps, bool training, bool relu, "
    "int channel_dim) -> Tensor",
    _input_gradient,
    lambda dy, input, *_: torch.empty_like(input),
)
