"""Batch norm in PyTorch's operators: any device, float dtype and layout, differentiable twice.

First come the passes; between them several processes exchange rank statistics, [2C + 1] values: forward means, sums of
squared deviations and the number of values per channel, backward `sum_dy`, `sum_dy_xhat` and that number. Last comes a
whole norm by PyTorch's own operator.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .. import _graph_numbers
from .._library import compute_dtype


class BatchNormSpec(NamedTuple):
    """Settings of a batch norm: the `eps` added to a variance, whether ReLU or SiLU follows, and the channel dimension.

    With `training` a norm uses the statistics of the batch, otherwise the running ones. `momentum` is the weight of the
    batch in the running statistics. `channel_dim` is 1 for [N, C, ...] in any memory format, -1 for [N, ..., C]. `silu`
    goes without an addend, without ReLU, and only in one process.
    """

    eps: float = 1e-5
    momentum: float = 0.1
    training: bool = True
    relu: bool = False
    channel_dim: int = 1
    silu: bool = False


def activation(spec: BatchNormSpec) -> str:
    """Return the name of the activation behind the norm, as kernels take it; "" for none."""
    return "silu" if spec.silu else "relu" if spec.relu else ""


def without_relu(spec: BatchNormSpec) -> BatchNormSpec:
    """Return the settings without ReLU or SiLU. PyTorch 2.6 compiles neither `_replace` nor slices of a NamedTuple."""
    return BatchNormSpec(spec.eps, spec.momentum, spec.training, False, spec.channel_dim)


def evaluating(spec: BatchNormSpec) -> BatchNormSpec:
    """Return the settings for normalising by given statistics."""
    return BatchNormSpec(spec.eps, spec.momentum, False, spec.relu, spec.channel_dim, spec.silu)


class Channels(NamedTuple):
    """Statistics and parameters of the channels: mean and biased variance, then weight and bias, if there are any.

    The statistics are None if they would be running statistics and the norm has none.
    """

    mean: Any
    variance: Any
    weight: Tensor | None = None
    bias: Tensor | None = None


class BatchStatistics(NamedTuple):
    """Mean of every channel of a batch, and its biased variance or, if `inverted`, 1 / sqrt(variance + eps)."""

    mean: Tensor
    spread: Tensor
    inverted: bool

    def asked(self) -> BatchStatistics:
        """Return itself; a CUDA graph that is being captured records that the caller may read the statistics."""
        if (capture := _graph_numbers.capturing()) is not None:
            capture.reads.update((id(self.mean), id(self.spread)))
        return self

    def inverse_deviation(self, eps: float) -> Tensor:
        """Return 1 / sqrt(variance + eps)."""
        return self.spread if self.inverted else (self.spread + eps).rsqrt()


class Exchange(Protocol):
    """A way to exchange rank statistics among the ranks of a group; None stands for a single process."""

    @property
    def averaged_ranks(self) -> int:
        """Number of ranks over which gradients of weight and bias are averaged; 0 if each rank keeps its own."""

    def gather(self, rank_stats: Tensor) -> Tensor:
        """Return the rank statistics of all ranks, [P, 2C + 1]."""

    def add_up(self, rank_stats: Tensor) -> object:
        """Replace rank statistics by their sum over all ranks, in place."""


class GradientSums(NamedTuple):
    """Sums per channel over all values that were normalised together, and 1 / the number of these values.

    If `sum_dy_xhat` is None, `sum_dy` holds sum_dy, sum_dy_xhat and the count, [2C + 1], as ranks exchange them.
    """

    sum_dy: Tensor
    sum_dy_xhat: Tensor | None
    inverse_count: float


def rank_statistics(input: Tensor, channel_dim: int) -> Tensor:
    """Return means, sums of squared deviations and number of values per channel, [2C + 1]; zeros if it is empty."""
    values = input.to(compute_dtype(input))
    dimensions = _other_dimensions(input, channel_dim)
    count = input.numel() // max(1, input.shape[channel_dim])
    mean = values.sum(dimensions) / max(1, count)
    deviations = (values - _spread(mean, input, channel_dim, mean.dtype)).square().sum(dimensions)
    return torch.cat((mean, deviations, mean.new_full((1,), count)))


def combine(
    rank_stats: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, momentum: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of the values of all ranks from [P, 2C + 1]; some ranks may have no values.

    Running statistics move towards them, the variance towards the unbiased one, unless there are no values at all.
    """
    channels = rank_stats.shape[1] // 2
    means, deviations, counts = rank_stats[:, :channels], rank_stats[:, channels:-1], rank_stats[:, -1:]
    count = counts.sum()
    mean = (counts * means).sum(0) / count.clamp(min=1)
    deviations = (deviations + counts * (means - mean).square()).sum(0)
    if running_mean is not None and running_var is not None:
        share = momentum * count.detach().clamp(max=1)
        for running, value in ((running_mean, mean), (running_var, deviations / (count - 1).clamp(min=1))):
            running.copy_(running.to(value.dtype).lerp(value.detach(), share))
    return mean, deviations / count.clamp(min=1)


def scale_shift(channels: Channels, eps: float) -> Tensor:
    """Return scale and shift, [2, C]: a normalised input is input * scale + shift."""
    mean, variance, weight, bias = channels
    scale = _scale(variance, weight, eps, variance.dtype)
    shift = -mean * scale
    return torch.stack((scale, shift if bias is None else shift + bias))


def normalise(
    input: Tensor, z: Tensor | None, channels: Channels, spec: BatchNormSpec, scaled: Tensor | None = None
) -> Tensor:
    """Return the output in the input's dtype, given the statistics to normalise by.

    `scaled`, a result of `scale_shift`, replaces the statistics for half precision: two values per channel in place of
    four, and their rounding does not show there.
    """
    mean, variance, weight, bias = channels
    dtype, channel_dim = compute_dtype(input, weight, bias), spec.channel_dim
    if scaled is not None and input.element_size() <= 2:
        scale, shift = (_spread(each, input, channel_dim, dtype) for each in scaled)
        values = input.to(dtype) * scale + shift
    else:
        centred = input.to(dtype) - _spread(mean, input, channel_dim, dtype)
        values = centred * _spread(_scale(variance, weight, spec.eps, dtype), input, channel_dim, dtype)
        if bias is not None:
            values = values + _spread(bias, input, channel_dim, dtype)
    if z is not None:
        values = values + z.to(dtype)
    if spec.relu:
        values = values.relu()
    elif spec.silu:
        values = functional.silu(values)
    # A cast may return its argument, and PyTorch 2.11 compiles a Function that returns its input without gradients.
    return values if values.dtype == input.dtype else values.to(input.dtype)


def gradient_sums(
    dy: Tensor, input: Tensor, output: Tensor | None, channels: Channels, spec: BatchNormSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient before the activation, `sum_dy` and `sum_dy_xhat`.

    The ReLU mask is taken from `output`, or computed again if `output` is None (only without an addend).
    """
    dy = masked(dy, input, output, channels, spec)
    dtype, channel_dim = compute_dtype(dy, input), spec.channel_dim
    wide, dimensions = dy.to(dtype), _other_dimensions(input, channel_dim)
    centred = input.to(dtype) - _spread(channels.mean, input, channel_dim, dtype)
    inverse_deviation = _scale(channels.variance, None, spec.eps, dtype)
    return dy, wide.sum(dimensions), (wide * centred).sum(dimensions) * inverse_deviation


def over_ranks(
    exchange: Exchange, rank_stats: Tensor, sum_dy: Tensor, sum_dy_xhat: Tensor, wants_input: bool
) -> tuple[Tensor, Tensor]:
    """Sum the rank statistics over all ranks in place; return the gradients of bias and weight."""
    if wants_input or exchange.averaged_ranks:  # otherwise a rank needs only its own sums
        exchange.add_up(rank_stats)
    if not exchange.averaged_ranks:
        return sum_dy, sum_dy_xhat
    sum_dy, sum_dy_xhat = (rank_stats[:-1] / exchange.averaged_ranks).chunk(2)
    return sum_dy, sum_dy_xhat


def input_gradient(
    dy: Tensor, input: Tensor, output: Tensor | None, channels: Channels, sums: GradientSums, spec: BatchNormSpec
) -> Tensor:
    """Return the input's gradient from the sums over all values that were normalised together."""
    dy = masked(dy, input, output, channels, spec)
    mean, variance, weight, _ = channels
    sum_dy, sum_dy_xhat, inverse_count = sums
    dtype, channel_dim = compute_dtype(dy, input, weight), spec.channel_dim
    scale = _scale(variance, weight, spec.eps, dtype)
    gradient = dy.to(dtype) * _spread(scale, input, channel_dim, dtype)
    if spec.training:
        if sum_dy_xhat is None:
            sum_dy, sum_dy_xhat, count = sum_dy.split((scale.numel(), scale.numel(), 1))
            share = scale / count.clamp(min=1).to(dtype)
        else:
            share = scale * inverse_count
        slope = share * sum_dy_xhat.to(dtype) * _scale(variance, None, spec.eps, dtype)
        gradient = gradient - _spread(share * sum_dy.to(dtype), input, channel_dim, dtype)
        centred = input.to(dtype) - _spread(mean, input, channel_dim, dtype)
        gradient = gradient - centred * _spread(slope, input, channel_dim, dtype)
    return gradient.to(input.dtype)


def gradients(
    dy: Tensor, input: Tensor, output: Tensor | None, channels: Channels, spec: BatchNormSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of input, addend, weight and bias, for one process, that can be differentiated again."""
    if spec.training:
        channels = Channels(*combine(rank_statistics(input, spec.channel_dim)[None]), channels.weight, channels.bias)
    output = None if output is None else output.detach()
    dz, sum_dy, sum_dy_xhat = gradient_sums(dy, input, output, channels, spec)
    sums = GradientSums(sum_dy, sum_dy_xhat, input.shape[spec.channel_dim] / max(1, input.numel()))
    dx = input_gradient(dz, input, None, channels, sums, without_relu(spec))
    return dx, dz, sum_dy_xhat, sum_dy


def norm(
    input: Tensor, z: Tensor | None, running: Channels, spec: BatchNormSpec
) -> tuple[Tensor, BatchStatistics | None]:
    """Return a norm for autograd of inputs with at most one value per channel, which PyTorch's operator refuses."""
    if not spec.training:
        return normalise(input, z, running, spec), None
    rank_stats = rank_statistics(input, spec.channel_dim)[None]
    mean, variance = combine(rank_stats, running.mean, running.variance, spec.momentum)
    batch_statistics = BatchStatistics(mean.detach(), variance.detach(), False)
    return normalise(input, z, Channels(mean, variance, running.weight, running.bias), spec), batch_statistics


def torch_norm(
    input: Tensor, z: Tensor | None, running: Channels, spec: BatchNormSpec, wanted: bool
) -> tuple[Tensor, BatchStatistics | None]:
    """Return the norm by PyTorch's operator, which takes float32 parameters, or float64 ones for a float64 input.

    The statistics of the batch are None unless they are `wanted`.
    """
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    values = input if spec.channel_dim == 1 else input.movedim(-1, 1)
    if not torch.compiler.is_compiling() and is_misaligned(values):
        values = values.clone()
    if input.dtype != wide and (
        z is not None
        or (torch.is_grad_enabled() and (values.is_cpu or not keeps_float32(values, spec.training)))  # it would round
    ):
        plain = without_relu(spec)  # round once, after the addition
        output, batch_statistics = torch_norm(input.to(wide), z, running, plain, wanted)
        output = output.to(input.dtype)
        return output.relu_() if spec.relu else output, batch_statistics
    mean, variance, weight, bias = running
    for each in running:
        if each is not None and (each.dtype != wide or not each.is_contiguous()):
            mean, variance, weight, bias = [_cast(each, wide) for each in running]
            break
    if input.dtype != wide:  # without float32 parameters PyTorch would round statistics to the input's dtype
        weight = values.new_ones(values.shape[1], dtype=wide) if weight is None else weight
        bias = values.new_zeros(values.shape[1], dtype=wide) if bias is None else bias
    # The first is known to Dynamo; the second takes a sixth of its time.
    cudnn = torch.backends.cudnn.enabled if torch.compiler.is_compiling() else torch._C._get_cudnn_enabled()
    flags = (spec.training, spec.momentum, spec.eps, cudnn)
    batch_statistics = None
    if wanted:  # the function behind torch.batch_norm, which also returns the statistics of the batch
        output, batch_mean, inverse_deviation, *_ = torch._batch_norm_impl_index(
            values, weight, bias, mean, variance, *flags
        )
        batch_statistics = BatchStatistics(batch_mean.detach(), inverse_deviation.detach(), True)
    else:
        output = torch.batch_norm(values, weight, bias, mean, variance, *flags)
    if spec.training and mean is not running.mean:
        running.mean.copy_(mean)
    if spec.training and variance is not running.variance:
        running.variance.copy_(variance)
    # Not in place, which takes autograd longer: the derivative of a batch norm does not need its output, which is
    # freed.
    if z is not None:
        output = output + (z if spec.channel_dim == 1 else z.movedim(-1, 1)).to(output.dtype)
    output = output.relu() if spec.relu else output
    return output if spec.channel_dim == 1 else output.movedim(1, -1), batch_statistics


def is_misaligned(values: Tensor) -> bool:
    """Return whether a tensor on a GPU does not start at a multiple of 16 bytes.

    PyTorch's batch norm of channels-last images fails for such a tensor with "misaligned address", and no other call
    of the process can use the GPU afterwards.
    """
    return values.is_cuda and values.storage_offset() * values.element_size() % 16 != 0


def keeps_float32(values: Tensor, training: bool) -> bool:
    """Return whether PyTorch's batch norm of [N, C, ...] computes all of its gradients in float32, if they are wanted.

    On a GPU this holds for channels-last images, and in training (cuDNN) for others except bfloat16. Otherwise
    it rounds to half precision between the steps of the backward pass. On a CPU it rounds too unless input and gradient
    are contiguous: a caller that may want gradients there must pass float32.
    """
    if values.element_size() > 2 or not values.is_cuda:
        return True
    if values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last):
        return True
    return training and values.dtype == torch.float16 and values.dim() in (4, 5) and torch.backends.cudnn.enabled


def _cast(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a parameter in `dtype` and contiguous: PyTorch's backward pass on a CPU misreads a strided weight."""
    if parameter is None or (parameter.dtype == dtype and parameter.is_contiguous()):
        return parameter
    return parameter.to(dtype).contiguous()


def masked(dy: Tensor, input: Tensor, output: Tensor | None, channels: Channels, spec: BatchNormSpec) -> Tensor:
    """Return `dy` times the ReLU mask or the slope of SiLU; `dy` itself without an activation."""
    if spec.silu:
        wide = input.to(compute_dtype(dy, input))
        before = normalise(wide, None, channels, without_relu(spec))
        sigmoid = before.sigmoid()
        return dy * (sigmoid * (1 + before * (1 - sigmoid)))
    if not spec.relu:
        return dy
    if output is None:
        output = normalise(input, None, channels, spec)
    return torch.where(output > 0, dy, 0)


def _scale(variance: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """Return 1 / sqrt(variance + eps), times the weight if there is one."""
    inverse_deviation = (variance.to(dtype) + eps).rsqrt()
    return inverse_deviation if weight is None else inverse_deviation * weight.to(dtype)


def _spread(parameter: Tensor, input: Tensor, channel_dim: int, dtype: torch.dtype) -> Tensor:
    """Return a value per channel, in `dtype`, shaped to broadcast over the input."""
    wide = parameter.to(dtype)
    return wide if channel_dim == -1 else wide.view(-1, *(1,) * (input.dim() - 2))


def _other_dimensions(input: Tensor, channel_dim: int) -> tuple[int, ...]:
    """Return all dimensions except the channel dimension."""
    return tuple(range(input.dim() - 1)) if channel_dim == -1 else (0, *range(2, input.dim()))
