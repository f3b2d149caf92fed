"""The stages of a batch norm, without autograd: kernels or PyTorch, whichever runs.

Between them a norm over several processes exchanges packets, a few values per channel: `statistics_packet`, gathered,
`joined_statistics`, `normalise`; backward `gradient_packet`, summed, `joined_input_gradient`. Counts may differ between
processes and are part of what is exchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _library
from . import kernel_norm, native, reference
from .layout import dense, laid_out_like
from .self_check import self_check
from .spec import BatchNormSpec

# Elements below which PyTorch's operators run. On an H200, 32 x 2048 x 7 x 7 values with ReLU take 24 and 24 us forward
# and backward with ours and 20 and 29 with PyTorch's, for which the host has less to do; 32 x 512 x 28 x 28 take 37 and
# 47 beside 50 and 69.
NATIVE_BELOW = 1 << 22
# Positions of an image from which on a norm with nothing behind it is quicker by kernels, where they are contiguous: in
# half precision 32 x 256 x 56 x 56 take 49 and 81 us beside 110 and 173, but 32 x 512 x 28 x 28 32 and 52 beside 27 and
# 38. Where channels are contiguous it is about as quick.
PLAIN_POSITIONS = 2048

FAMILY = _library.register_family(
    _library.OpFamily(
        "batch_norm",
        "batch norm with an addend and ReLU, in both layouts",
        self_check,
        small_inputs=f"PyTorch's operators below {NATIVE_BELOW:,} elements, but for halves with an addend, and mostly "
        "without an addend or ReLU",
    )
)


def direct_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, spec: BatchNormSpec
) -> kernel_norm.KernelNorm | None:
    """The stages by kernels, where these run and take the tensors as they are: what stages do without looking twice."""
    if (
        _takes_kernels(input)
        and dense(input, spec) is input
        and (weight is None or weight.is_contiguous())
        and (bias is None or bias.is_contiguous())
    ):
        return kernel_norm.kernel_norm(input, weight, bias, spec)
    return None


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
    norm = kernel_norm.kernel_norm(values, None, None, spec)
    with contiguous_places(running_mean, running_var) as places:
        return norm.statistics(values, *places, spec.momentum)


def statistics_packet(input: Tensor, spec: BatchNormSpec) -> Tensor:
    """[2C + 1]: means, sums of squared deviations and number of values per channel of an input that may be empty."""
    if not _takes_kernels(input):
        mean, variance = (native if native.fits(input) else reference).statistics(input, spec)
        count = _values(input, spec)
        return torch.cat((mean, variance * count, mean.new_full((1,), count)))
    values = dense(input, spec)
    return kernel_norm.kernel_norm(values, None, None, spec).packet(values)


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
    with contiguous_places(running_mean, running_var) as places:
        return kernel_norm.combine(parts, *places, momentum)


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
    return kernel_norm.kernel_norm(values, weight, bias, spec).apply(values, z, mean, variance, weight, bias)


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
    norm = kernel_norm.kernel_norm(values, weight, bias, spec)
    kept, plain, along, told = norm.sums(dy, values, output, mean, variance, weight, bias, keep and spec.relu, packet)
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
    inverse_count: float | Tensor,
    spec: BatchNormSpec,
) -> Tensor:
    """The input's gradient from `gradient`, which is `dy`, or what ReLU lets through of it if `spec` has no ReLU.

    `plain` and `along` are the sums over everything that was normalised together, `inverse_count` one over how many
    values that were per channel.
    """
    if _takes_kernels(input):
        sums = (plain.contiguous(), along.contiguous(), float(inverse_count))
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
    channels = packet.numel() // 2
    plain, along, inverse_count = packet[:channels], packet[channels:-1], packet[-1].clamp(min=1).reciprocal()
    return input_gradient(gradient, input, output, mean, variance, weight, bias, plain, along, inverse_count, spec)


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
    norm = kernel_norm.kernel_norm(values, weight, bias, spec)
    return norm.input_gradient(gradient, values, output, mean, variance, weight, bias, *sums)


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


class contiguous_places:
    """A context with running statistics, where there are any, as kernels can write them."""

    def __init__(self, running_mean: Tensor | None, running_var: Tensor | None) -> None:
        self._running = (running_mean, running_var)

    def __enter__(self) -> tuple[Tensor | None, Tensor | None]:
        self._places = (_contiguous(self._running[0]), _contiguous(self._running[1]))
        return self._places

    def __exit__(self, *error: object) -> None:
        for running, updated in zip(self._running, self._places, strict=True):
            if running is not None and updated is not None and updated is not running:
                running.copy_(updated)


def _values(input: Tensor, spec: BatchNormSpec) -> int:
    """Values per channel."""
    return input.numel() // max(1, input.shape[spec.channel_dim])


def _contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _takes_kernels(input: Tensor) -> bool:
    """Whether a stage on its own runs as a kernel; how large the input is does not matter here."""
    return input.numel() > 0 and _library.runs_triton(FAMILY, input)
