"""The stages of a batch norm, without autograd: kernels or PyTorch, whichever runs.

Between them a norm over several processes exchanges packets, a few values per channel: `statistics_packet`, gathered,
`joined_statistics`, `normalise`; backward `gradient_packet`, summed, `joined_input_gradient`. Counts may differ between
processes and are part of what is exchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .. import _library
from . import native, reference
from .launches import (
    dense,
    geometry_of,
    laid_out_like,
    triton_apply,
    triton_combine,
    triton_input_gradient,
    triton_packet,
    triton_statistics,
    triton_sums,
)
from .self_check import self_check
from .spec import BatchNormSpec

# Elements below which PyTorch's operators run: a pass over so few takes less time than a launch, of which our kernels
# need more. Reasoned, not yet measured.
NATIVE_BELOW = 1 << 20

FAMILY = _library.register_family(
    _library.OpFamily(
        "batch_norm",
        "batch norm with an addend and ReLU, in both layouts",
        self_check,
        small_inputs=f"PyTorch's operators below {NATIVE_BELOW:,} elements, and without an addend or ReLU",
    )
)


def local_statistics(
    input: Tensor, spec: BatchNormSpec, running_mean: Tensor | None = None, running_var: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel of this input; running statistics move towards them."""
    if not _takes_kernels(input):
        mean, variance = (native if native.fits(input) else reference).statistics(input, spec)
        if running_mean is not None and running_var is not None and input.numel():
            count = input.numel() // input.shape[spec.channel_dim]
            reference.update_running(running_mean, running_var, mean, variance, count, spec.momentum)
        return mean, variance
    values = dense(input, spec)
    geometry = geometry_of(values, spec)
    if running_mean is None or running_var is None:
        return triton_statistics(values, geometry)
    with _contiguous_places(running_mean, running_var) as places:
        return triton_statistics(values, geometry, *places, spec.momentum)


def statistics_packet(input: Tensor, spec: BatchNormSpec) -> Tensor:
    """[2C + 1]: means, sums of squared deviations and number of values per channel of an input that may be empty."""
    if not _takes_kernels(input):
        mean, variance = (native if native.fits(input) else reference).statistics(input, spec)
        count = _values(input, spec)
        return torch.cat((mean, variance * count, mean.new_full((1,), count)))
    values = dense(input, spec)
    return triton_packet(values, geometry_of(values, spec))


def joined_statistics(
    parts: Tensor, momentum: float = 0.0, running_mean: Tensor | None = None, running_var: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel of a whole; running statistics move towards them.

    `parts` [P, 2C + 1] are packets. Nothing waits for the device.
    """
    if not _takes_kernels(parts):
        mean, deviations, count = reference.joined(parts)
        if running_mean is not None and running_var is not None:
            share = momentum * count.clamp(max=1)
            for running, value in ((running_mean, mean), (running_var, deviations / (count - 1).clamp(min=1))):
                if running.dtype == value.dtype:
                    running.lerp_(value, share)
                else:
                    running.copy_(running.to(value.dtype).lerp(value, share))
        return mean, deviations / count.clamp(min=1)
    if running_mean is None or running_var is None:
        return triton_combine(parts)
    with _contiguous_places(running_mean, running_var) as places:
        return triton_combine(parts, *places, momentum)


def normalise(
    input: Tensor,
    z: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
) -> Tensor:
    """The output, given mean and variance of every channel: those of a batch or running ones."""
    if not _takes_kernels(input):
        path = native if native.fits(input, z, mean, variance, weight, bias) else reference
        return path.apply(input, z, mean, variance, weight, bias, spec)
    values = dense(input, spec)
    mean, variance, weight, bias = mean.contiguous(), variance.contiguous(), _contiguous(weight), _contiguous(bias)
    z = None if z is None else laid_out_like(values, z)
    return triton_apply(values, geometry_of(values, spec), z, mean, variance, weight, bias, spec)


def gradient_sums(
    dy: Tensor,
    input: Tensor,
    output: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
    keep: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """What ReLU lets through of `dy`, then per channel its sum and its sum times the normalised input.

    The sums are the gradients of bias and weight. The first, which is the gradient of an addend, is None unless
    `keep`, and `dy` itself without ReLU. `output` says what ReLU let through; None stands for that of a norm without an
    addend, which is computed again.
    """
    return _sums(dy, input, output, mean, variance, weight, bias, spec, keep, False)[:3]


def gradient_packet(
    dy: Tensor,
    input: Tensor,
    output: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
    keep: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """`gradient_sums`, and what is to be summed over processes: [2C + 1] both sums and the number of values."""
    kept, plain, along, packet = _sums(dy, input, output, mean, variance, weight, bias, spec, keep, True)
    if packet is None:
        packet = torch.cat((plain, along, plain.new_full((1,), _values(input, spec))))
    return kept, plain, along, packet


def _sums(
    dy: Tensor,
    input: Tensor,
    output: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
    keep: bool,
    packet: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    if not _takes_kernels(input):
        if not spec.relu:
            output = dy  # not asked
        elif output is None:
            output = normalise(input, None, mean, variance, weight, bias, spec)
        if not native.fits(input, dy, mean, variance):
            return *reference.sums(dy, input, output, mean, variance, spec), None
        dy = torch.where(output > 0, dy, 0) if spec.relu else dy
        return dy, *native.sums(dy, input, mean, variance, spec), None
    values = dense(input, spec)
    dy = laid_out_like(values, dy)
    output = None if output is None else laid_out_like(values, output)
    mean, variance, weight, bias = mean.contiguous(), variance.contiguous(), _contiguous(weight), _contiguous(bias)
    geometry = geometry_of(values, spec)
    kept, plain, along, told = triton_sums(
        dy, values, geometry, output, mean, variance, weight, bias, spec, keep and spec.relu, packet
    )
    return dy if keep and not spec.relu else kept, plain, along, told


def input_gradient(
    gradient: Tensor,
    input: Tensor,
    output: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    plain: Tensor,
    along: Tensor,
    inverse_count: float,
    spec: BatchNormSpec,
) -> Tensor:
    """The input's gradient from `gradient`, which is `dy`, or what ReLU lets through of it if `spec` has no ReLU.

    `plain` and `along` are the sums over everything that was normalised together, `inverse_count` one over how many
    values that were per channel.
    """
    if _takes_kernels(input):
        sums = (plain.contiguous(), along.contiguous(), inverse_count)
        return _kernel_gradient(gradient, input, output, mean, variance, weight, bias, sums, spec)
    if spec.relu:
        if output is None:
            output = normalise(input, None, mean, variance, weight, bias, spec)
        gradient = torch.where(output > 0, gradient, 0)
    path = native if native.fits(input, gradient, mean, variance, weight, plain, along) else reference
    return path.input_gradient(gradient, input, mean, variance, weight, plain, along, inverse_count, spec)


def joined_input_gradient(
    gradient: Tensor,
    input: Tensor,
    output: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    packet: Tensor,
    spec: BatchNormSpec,
) -> Tensor:
    """The same, the sums and the number of values being those of a packet summed over all processes."""
    if _takes_kernels(input):
        return _kernel_gradient(gradient, input, output, mean, variance, weight, bias, (packet, None, None), spec)
    plain, along = (packet[:-1] / packet[-1].clamp(min=1)).chunk(2)
    return input_gradient(gradient, input, output, mean, variance, weight, bias, plain, along, 1.0, spec)


def _kernel_gradient(
    gradient: Tensor,
    input: Tensor,
    output: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    sums: tuple[Tensor, Tensor | None, float | None],
    spec: BatchNormSpec,
) -> Tensor:
    values = dense(input, spec)
    gradient = laid_out_like(values, gradient)
    output = None if output is None else laid_out_like(values, output)
    mean, variance, weight, bias = mean.contiguous(), variance.contiguous(), _contiguous(weight), _contiguous(bias)
    geometry = geometry_of(values, spec)
    return triton_input_gradient(gradient, values, geometry, output, mean, variance, weight, bias, *sums, spec)


def gradients(
    dy: Tensor,
    input: Tensor,
    output: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
    has_z: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of input, addend (None without one), weight and bias, for a norm over this input alone."""
    kept, plain, along = gradient_sums(dy, input, output, mean, variance, weight, bias, spec, has_z)
    inverse_count = input.shape[spec.channel_dim] / max(1, input.numel())
    if kept is not None and has_z:
        # What ReLU let through is there: no need to ask the output again.
        dy, output, spec = kept, None, spec._replace(relu=False)
    dx = input_gradient(dy, input, output, mean, variance, weight, bias, plain, along, inverse_count, spec)
    return dx, kept if has_z else None, along, plain


@contextlib.contextmanager
def _contiguous_places(running_mean: Tensor, running_var: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Running statistics as kernels can write them."""
    places = (running_mean.contiguous(), running_var.contiguous())
    yield places
    for running, updated in zip((running_mean, running_var), places, strict=True):
        if updated is not running:
            running.copy_(updated)


def _values(input: Tensor, spec: BatchNormSpec) -> int:
    """Values per channel."""
    return input.numel() // max(1, input.shape[spec.channel_dim])


def _contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _takes_kernels(input: Tensor) -> bool:
    """Whether a stage on its own runs as a kernel; how large the input is does not matter here."""
    return input.numel() > 0 and _library.runs_triton(FAMILY, input)
