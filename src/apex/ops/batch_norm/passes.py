"""The passes of a batch norm over one process or several, without autograd: kernels or PyTorch's operators.

The forward passes are `statistics` and `normalise`, the backward passes `local_gradients` and `input_gradient`. In
between, the ranks of a group exchange their rank statistics, [2C + 1] values. Forward these are means, sums of squared
deviations and the number of values per channel, which are gathered; backward `sum_dy`, `sum_dy_xhat` and that number,
which are added up. Statistics are mean and biased variance of every channel, in float32 (float64 for float64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _library
from . import config, reference
from .kernel_passes import (
    launch_backward,
    launch_combine,
    launch_input_gradient,
    launch_normalise,
    launch_rank_statistics,
    launch_statistics,
    like,
)
from .reference import BatchNormSpec, Channels, Exchange, GradientSums

# Dynamo of PyTorch 2.6 refuses to trace strides in a backward pass; Dynamo of 2.9 traces them.
_TRACES_STRIDES = torch.__version__ >= "2.9"


def statistics(
    input: Tensor,
    spec: BatchNormSpec,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    exchange: Exchange | None = None,
) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of every channel over all ranks; move running statistics towards them.

    The host does not wait for the device.
    """
    running = (running_mean, running_var)
    if exchange is None and _takes_kernels(input):
        if torch.compiler.is_compiling():
            return scaled_statistics(input, Channels(*running), spec)[:2]
        return launch_statistics(input, spec, Channels(*running))[:2]
    rank_stats = rank_statistics(input.detach(), spec.channel_dim)
    all_ranks = rank_stats[None] if exchange is None else exchange.gather(rank_stats)
    if torch.compiler.is_compiling() or not _takes_kernels(all_ranks):
        return reference.combine(all_ranks, *running, spec.momentum)
    return launch_combine(all_ranks, *running, spec.momentum)


def scaled_statistics(input: Tensor, running: Channels, spec: BatchNormSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, variance, and scale and shift [2, C], of one process, by the operator for compiled graphs.

    Running statistics move towards the batch's.
    """
    mean, variance, *parameters = running
    constants = [None if each is None else each.detach() for each in parameters]
    tensors = (input.detach(), mean, variance, *constants)
    return torch.ops.apex.batch_norm_statistics(*tensors, spec.momentum, spec.eps, spec.channel_dim)


def rank_statistics(input: Tensor, channel_dim: int) -> Tensor:
    """Return means, sums of squared deviations and number of values per channel, [2C + 1]; the input may be empty."""
    if not _takes_kernels(input):
        return reference.rank_statistics(input, channel_dim)
    if torch.compiler.is_compiling():
        mean, variance, _ = scaled_statistics(input, Channels(None, None), BatchNormSpec(channel_dim=channel_dim))
        count = values_per_channel(input, channel_dim)
        return torch.cat((mean, variance * count, mean.new_full((1,), count)))
    return launch_rank_statistics(input, channel_dim)


def normalise(
    input: Tensor, z: Tensor | None, channels: Channels, spec: BatchNormSpec, scale_shift: Tensor | None = None
) -> Tensor:
    """Return the output of the norm, computed with the mean and variance in `channels`.

    torch.compile gets PyTorch's operators and fuses them with the operators before: the addend may come from a norm.
    """
    if launches(input):
        return launch_normalise(input, z, channels, spec)
    return reference.normalise(input, z, channels, spec, scale_shift)


def local_gradients(
    dy: Tensor,
    input: Tensor,
    output: Tensor | None,
    channels: Channels,
    spec: BatchNormSpec,
    wants_input: bool,
    wants_z: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Return the gradients of input and addend (None if they are not wanted), weight and bias, of one process.

    The addend's gradient is `dy` times the ReLU mask.
    """
    arguments = (dy, input, output, channels, spec)
    if launches(input):
        return launch_backward(*arguments, None, wants_input, wants_z)
    if spec.silu:  # the operator in a compiled graph knows only ReLU
        dy, spec = reference.masked(*arguments), reference.without_relu(spec)
        arguments = (dy, input, output, channels, spec)
    dx: Tensor | None = None
    dz: Tensor | None = dy
    if not _takes_kernels(input):
        dz, sum_dy, sum_dy_xhat = reference.gradient_sums(*arguments)
        if wants_input:
            sums = GradientSums(sum_dy, sum_dy_xhat, 1 / max(1, values_per_channel(input, spec.channel_dim)))
            dx = reference.input_gradient(dz, input, None, channels, sums, reference.without_relu(spec))
    else:
        if wants_z and spec.relu:
            # In PyTorch's operators: Inductor fuses them with the sum of the gradients from the output's readers.
            dz = reference.masked(*arguments)
            output, spec = None, reference.without_relu(spec)
            if _TRACES_STRIDES:
                # as_strided makes Inductor keep the result, which it would otherwise compute again for each reader.
                dz = dz.as_strided(dz.shape, dz.stride())
        flags = (spec.eps, spec.training, spec.relu, spec.channel_dim, wants_input)
        dx, sum_dy, sum_dy_xhat = torch.ops.apex.batch_norm_backward(dz, input, output, *channels, *flags)
    return dx if wants_input else None, dz if wants_z else None, sum_dy_xhat, sum_dy


def input_gradient(
    dy: Tensor, input: Tensor, output: Tensor | None, channels: Channels, sums: GradientSums, spec: BatchNormSpec
) -> Tensor:
    """Return the input's gradient, computed by PyTorch's operators under torch.compile."""
    compute = launch_input_gradient if launches(input) else reference.input_gradient
    return compute(dy, input, output, channels, sums, spec)


def _takes_kernels(input: Tensor) -> bool:
    """Return whether kernels compute a pass, for an input of any size but 0."""
    return input.numel() > 0 and _library.runs_triton(FAMILY, input)


def launches(input: Tensor) -> bool:
    """Return whether the passes launch kernels: not in a compiled graph, which contains operators instead."""
    return not torch.compiler.is_compiling() and _library.runs_triton_now(FAMILY, input) and input.numel() > 0


def values_per_channel(input: Tensor, channel_dim: int) -> int:
    """Return how many values are normalised together in this process."""
    return input.numel() // max(1, input.shape[channel_dim])


FAMILY = _library.register_family(
    _library.OpFamily(
        "batch_norm",
        "batch norm with an addend and ReLU, in both layouts",
        small_inputs=f"PyTorch's operators below {config.NATIVE_BELOW:,} elements (compiled {config.COMPILED_BELOW:,})"
        ", but for halves with an addend, and mostly without an addend or ReLU",
    )
)


# Operators that torch.compile puts into a graph in place of launches. Results have the layout that PyTorch would give
# the input.
def _statistics(input, running_mean, running_var, weight, bias, momentum, eps, channel_dim):  # type: ignore[no-untyped-def]
    spec = BatchNormSpec(eps, momentum, channel_dim=channel_dim)
    if _takes_kernels(input):
        return launch_statistics(input, spec, Channels(running_mean, running_var, weight, bias))
    mean, variance = statistics(input, spec, running_mean, running_var)
    return mean, variance, reference.scale_shift(Channels(mean, variance, weight, bias), eps)


def _statistics_fake(input, *rest):  # type: ignore[no-untyped-def]
    mean = input.new_empty(input.shape[rest[-1]], dtype=_library.compute_dtype(input))
    return mean, torch.empty_like(mean), mean.new_empty(2, *mean.shape)


def _backward(dy, input, output, *rest):  # type: ignore[no-untyped-def]
    *channels, eps, training, relu, channel_dim, wants_input = rest
    spec = BatchNormSpec(eps, 0.0, training, relu, channel_dim)
    dx, _, sum_dy_xhat, sum_dy = local_gradients(dy, input, output, Channels(*channels), spec, wants_input, False)
    if dx is None:
        dx = input.new_empty(0)
    elif dx.stride() != input.stride():
        dx = like(torch.empty_like(input), dx)
    return dx, sum_dy, sum_dy_xhat


def _backward_fake(dy, input, output, mean, *rest):  # type: ignore[no-untyped-def]
    sum_dy = torch.empty_like(mean, dtype=_library.compute_dtype(dy, input))
    return torch.empty_like(input) if rest[-1] else input.new_empty(0), sum_dy, torch.empty_like(sum_dy)


_library.register_op(
    "batch_norm_statistics(Tensor input, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor? weight, "
    "Tensor? bias, float momentum, float eps, int channel_dim) -> (Tensor, Tensor, Tensor)",
    _statistics,
    _statistics_fake,
)
_library.register_op(
    "batch_norm_backward(Tensor dy, Tensor input, Tensor? output, Tensor mean, Tensor variance, Tensor? weight, "
    "Tensor? bias, float eps, bool training, bool relu, int channel_dim, bool wants_input) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
