"""`batch_norm` with its forward and backward passes and its autograd Function.

Local norms pass no `exchange` to these functions; SyncBatchNorm and the group norms pass their process group's. No
`Op` declares the norm: it changes running statistics, ranks exchange sums between its passes, and in a compiled graph
only statistics and gradients are operators, so that Inductor fuses the normalisation with its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import _library
from .._checks import check_parameters, check_tensors
from . import config, reference
from .kernel_passes import launch_backward, launch_forward
from .passes import (
    FAMILY,
    input_gradient,
    launches,
    local_gradients,
    normalise,
    scaled_statistics,
    statistics,
    values_per_channel,
)
from .reference import BatchNormSpec, BatchStatistics, Channels, Exchange, GradientSums


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    z: Tensor | None = None,
    relu: bool = False,
    silu: bool = False,
    channel_dim: int = 1,
) -> Tensor:
    """Return the batch norm of `input`, plus `z` if it is given, then ReLU if `relu` is set, or SiLU if `silu` is.

    `input` is [N, C, ...] in any memory format, or [N, ..., C] with `channel_dim=-1`. In `training` the statistics are
    computed from the input, and the running statistics, if given, move towards them by `momentum`; otherwise the
    running statistics are used. The running variance is the unbiased one, except for a single value per channel.
    Statistics are float32 (float64 for float64). The output has the dtype of the input. `silu` goes with neither `z`
    nor `relu`.
    """
    if silu:
        return _batch_norm_silu(
            input, (running_mean, running_var, weight, bias), training, momentum, eps, z, relu, channel_dim
        )
    if (
        not torch.compiler.is_compiling()
        and isinstance(input, Tensor)
        and (input.numel() < config.NATIVE_BELOW or (z is None and not relu))
        and torch_checks(input, z, running_mean, running_var, weight, bias, training, channel_dim)
    ):
        cudnn = torch._C._get_cudnn_enabled()
        try:
            channels = (weight, bias, running_mean, running_var)
            output = torch.batch_norm(input, *channels, bool(training), momentum, eps, cudnn)
            # Not in place, which takes autograd longer. The norm's output is freed: its derivative does not need it.
            output = output if z is None else output + z
        except RuntimeError:
            spec = BatchNormSpec(training=training)
            check(input, Channels(running_mean, running_var, weight, bias), z, spec)  # raises our own error if it can
            raise
        return output.relu() if relu else output
    spec = BatchNormSpec(float(eps), float(momentum), bool(training), bool(relu), channel_dim)
    running = Channels(running_mean, running_var, weight, bias)
    return batch_norm_with_statistics(input, z, running, spec, wanted=False)[0]


def _batch_norm_silu(
    input: Tensor, channels: Any, training: bool, momentum: float, eps: float, z: Any, relu: bool, channel_dim: int
) -> Tensor:
    """Return silu(batch norm), rounded once: in one pass behind the statistics if kernels run, else by PyTorch's SiLU.

    In a compiled graph Inductor fuses the two.
    """
    if z is not None or relu:
        raise ValueError("silu=True is for a norm without an addend z and without relu")
    spec = BatchNormSpec(float(eps), float(momentum), bool(training), False, channel_dim, True)
    running = Channels(*channels)
    check(input, running, None, spec)
    if torch.compiler.is_compiling():
        return functional.silu(batch_norm(input, *running, training, momentum, eps, channel_dim=channel_dim))
    if not runs_kernels(input, None, spec):
        wide = input.to(_library.compute_dtype(input))
        output = functional.silu(batch_norm(wide, *running, training, momentum, eps, channel_dim=channel_dim))
        return output.to(input.dtype)
    return batch_norm_with_statistics(input, None, running, spec, wanted=False)[0]


def batch_norm_with_statistics(
    input: Tensor,
    z: Tensor | None,
    running: Channels,
    spec: BatchNormSpec,
    exchange: Exchange | None = None,
    wanted: bool = True,
) -> tuple[Tensor, BatchStatistics | None]:
    """Return the batch norm over the ranks of `exchange`, and, in training and if `wanted`, the batch's statistics."""
    channels, compiling = check(input, running, z, spec), torch.compiler.is_compiling()
    if exchange is None:
        values = input.numel()
        if not values or (spec.training and values == channels):
            return reference.norm(input, z, running, spec)
        if not runs_kernels(input, z, spec, compiling):
            return reference.torch_norm(input, z, running, spec, wanted and spec.training)
    mean, variance, weight, bias = running
    output = scale_shift = None
    if not compiling if exchange is None else launches(input):
        output, mean, variance = launch_forward(input, z, running, spec, exchange)
    elif spec.training and exchange is None:
        mean, variance, scale_shift = scaled_statistics(input, running, spec)
    elif spec.training:
        mean, variance = statistics(input, spec, mean, variance, exchange)
    if torch.is_grad_enabled():
        given = (mean, variance, scale_shift, spec, exchange, output)
        output = BatchNormFunction.apply(input, z, weight, bias, given)
    elif output is None:
        output = normalise(input, z, Channels(mean, variance, weight, bias), spec, scale_shift)
    return output, BatchStatistics(mean, variance, False) if wanted and spec.training else None


def torch_checks(
    input: Tensor,
    z: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    channel_dim: int,
) -> bool:
    """Return whether PyTorch's operator may take a small or plain norm without `check`, as it checks enough itself.

    For few elements, `check` and the code after it take half as long as the operator's own work on the host.
    """
    if channel_dim != 1 or _library.requested == "triton":
        return False
    shape, dtype, values, on_cpu = input.shape, input.dtype, input.numel(), input.is_cpu
    if len(shape) < 2 or values <= shape[1] or (running_mean is None) != (running_var is None):
        return False
    if reference.is_misaligned(input):
        return False
    is_large = values >= config.NATIVE_BELOW
    if is_large and training and input.is_contiguous() and config.plain_by_kernels(shape[2:].numel(), shape[1], dtype):
        return False  # kernels may be quicker
    if dtype != torch.float32:
        if dtype not in _library.TRITON_DTYPES or on_cpu or z is not None or weight is None or bias is None:
            return False  # PyTorch would round between norm and addend, or refuse float32 parameters
        if not reference.keeps_float32(input, training):
            return False
    elif z is not None and (z.dtype != dtype or z.shape != shape):
        return False
    if z is not None and running_mean is not None and z.device != input.device:
        return False  # PyTorch would raise only after the running statistics have moved
    for each in (running_mean, running_var, weight, bias):
        if each is not None and (
            type(each) not in _library.PLAIN
            or each.is_cpu != on_cpu  # on a CPU PyTorch raises only after the running statistics have moved
            or each.dtype != torch.float32
            or each.dim() != 1
            or not each.is_contiguous()
        ):
            return False
    return True


def check(input: Tensor, running: Channels, z: Tensor | None, spec: BatchNormSpec) -> int:
    """Return the number of channels; raise for arguments that do not fit together."""
    if not isinstance(input, Tensor):
        check_tensors(input=input)
    running_mean, running_var, weight, bias = running
    shape, device, channel_dim = input.shape, input.device, spec.channel_dim
    if channel_dim not in (1, -1):
        raise ValueError(f"channel_dim={channel_dim} is not known; 1 for [N, C, ...] and -1 for [N, ..., C] are")
    if len(shape) < 2:
        raise ValueError(f"input has shape {list(shape)}; images and channels, at least two dimensions, are needed")
    if input.dtype not in _library.TRITON_DTYPES and not input.dtype.is_floating_point:
        raise TypeError(f"batch_norm needs a floating-point input, got {input.dtype}")
    if running_mean is None or running_var is None:
        if running_mean is not running_var:
            raise ValueError("running_mean and running_var must be given together, or neither of them")
        if not spec.training:
            raise ValueError("running_mean and running_var are needed where training is False")
    channels = shape[channel_dim]
    for each in running:
        if each is not None and (
            type(each) not in _library.PLAIN
            or each.shape != (channels,)
            or each.device != device
            or each.dtype not in _library.TRITON_DTYPES
        ):  # a parameter may be wrong: find out which
            check_parameters(
                input, (channels,), weight=weight, bias=bias, running_mean=running_mean, running_var=running_var
            )
    if z is not None:
        if z.shape != shape:
            raise ValueError(f"z has shape {list(z.shape)}, the input {list(shape)}")
        if z.device != device:
            raise ValueError(f"z is on {z.device}, the input on {device}")
        if z.dtype not in _library.TRITON_DTYPES and not z.dtype.is_floating_point:
            raise TypeError(f"z must be floating-point, got {z.dtype}")
    return channels


def check_values(input: Tensor, channels: int) -> None:
    """Raise a ValueError if each channel of a training batch has one value, whose variance is 0, as PyTorch does."""
    if input.numel() == channels:
        raise ValueError(f"input has shape {list(input.shape)}; training needs more than one value per channel")


def runs_kernels(input: Tensor, z: Tensor | None, spec: BatchNormSpec, compiling: bool = False) -> bool:
    """Return whether kernels run: for large inputs with something behind the norm, or if PyTorch is slow or inexact."""
    if not (_library.runs_triton if compiling else _library.runs_triton_now)(FAMILY, input):
        return False
    if _library.requested == "triton":
        return True
    if z is not None and input.element_size() <= 2:
        return True  # PyTorch would round the norm before it adds
    is_large = input.numel() >= (config.COMPILED_BELOW if compiling else config.NATIVE_BELOW)
    if is_large and (compiling or spec.relu or spec.silu or z is not None):
        return True
    if not reference.keeps_float32(input if spec.channel_dim == 1 else input.movedim(-1, 1), spec.training):
        return True  # PyTorch's gradients would be inexact, or need copies to be exact
    if not is_large:
        return False
    contiguous = spec.training and spec.channel_dim == 1 and input.dim() > 2 and input.is_contiguous()
    return contiguous and config.plain_by_kernels(input.shape[2:].numel(), input.shape[1], input.dtype)


def average_factor(momentum: float | None, num_batches_tracked: Tensor | None) -> float:
    """Return the weight of the next batch in running statistics: the momentum, or if that is None an equal share.

    As in PyTorch, an equal share waits for the device to report the number of batches. The caller counts the batch
    after the norm has taken it.
    """
    if momentum is not None:
        return momentum
    if num_batches_tracked is None:
        return 0.0
    return 1.0 / (float(num_batches_tracked) + 1.0)


def forward(
    input: Tensor, z: Tensor | None, running: Channels, spec: BatchNormSpec, exchange: Exchange | None = None
) -> tuple[Tensor, Channels]:
    """Return the output and the statistics and parameters that normalised it, without autograd."""
    mean, variance, weight, bias = running
    if launches(input):
        output, mean, variance = launch_forward(input, z, running, spec, exchange)
        return output, Channels(mean, variance, weight, bias)
    if spec.training:
        mean, variance = statistics(input, spec, mean, variance, exchange)
    channels = Channels(mean, variance, weight, bias)
    return normalise(input, z, channels, spec), channels


def backward(
    dy: Tensor,
    input: Tensor,
    output: Tensor | None,
    channels: Sequence[Tensor | None],
    spec: BatchNormSpec,
    exchange: Exchange | None = None,
    wants_input: bool = True,
    wants_z: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Return the gradients of input and addend (None if they are not wanted), weight and bias, without autograd.

    `channels` are mean, variance, weight and bias. ReLU's mask is taken from `output`. For a norm without an addend
    `output` may be None, and the mask is computed again.
    """
    if launches(input):
        return launch_backward(dy, input, output, channels, spec, exchange, wants_input, wants_z)
    channels = Channels(*channels)
    if exchange is None:
        return local_gradients(dy, input, output, channels, spec, wants_input, wants_z)
    _, dz, sum_dy_xhat, sum_dy = local_gradients(dy, input, output, channels, spec, False, wants_z)
    count = sum_dy.new_full((1,), values_per_channel(input, spec.channel_dim))
    rank_stats = torch.cat((sum_dy, sum_dy_xhat, count))
    sum_dy, sum_dy_xhat = reference.over_ranks(exchange, rank_stats, sum_dy, sum_dy_xhat, wants_input)
    if not wants_input:
        return None, dz, sum_dy_xhat, sum_dy
    if dz is not None:  # the ReLU mask was applied: the output is no longer needed
        dy, output, spec = dz, None, reference.without_relu(spec)
    sums = GradientSums(rank_stats, None, 0.0)
    return input_gradient(dy, input, output, channels, sums, spec), dz, sum_dy_xhat, sum_dy


def save(
    ctx: Any,
    input: Tensor,
    z: Tensor | None,
    output: Tensor,
    channels: Sequence[Tensor | None],
    spec: BatchNormSpec,
    exchange: Exchange | None,
    launched: bool = False,
) -> None:
    """Save the tensors that `saved_gradients` needs; `launched` says that kernels took the input."""
    # Without an addend ReLU's mask is computed again, so that the output need not be saved or read.
    kept = output if spec.relu and z is not None else None
    ctx.save_for_backward(input, kept, *channels)
    ctx.spec, ctx.exchange, ctx.launched = spec, exchange, launched


def saved_gradients(ctx: Any, dy: Tensor, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, addend, weight and bias, None if not wanted; for every autograd Function.

    Autograd casts them to the dtypes of the tensors they belong to.
    """
    input, output, *channels = ctx.saved_tensors
    spec, exchange = ctx.spec, ctx.exchange
    wants_input, wants_z, wants_weight, wants_bias = wanted
    gradients: tuple[Tensor | None, ...]
    if exchange is None and torch.is_grad_enabled():  # create_graph=True: the gradients must be differentiable
        gradients = reference.gradients(dy, input, output, Channels(*channels), spec)
    elif ctx.launched and _library.is_eager(dy):  # kernels take the tensors again, in plain eager mode
        gradients = launch_backward(dy, input, output, channels, spec, exchange, wants_input, wants_z)
    else:
        gradients = backward(dy, input, output, channels, spec, exchange, wants_input, wants_z)
    dx, dz, dweight, dbias = gradients
    return (
        dx if wants_input else None,
        dz if wants_z else None,
        dweight if wants_weight else None,
        dbias if wants_bias else None,
    )


class BatchNormFunction(torch.autograd.Function):
    """Autograd node of a norm whose mean and biased variance have been computed before.

    `settings` holds the arguments without gradients and, last, the output, or None if it must be computed. They are one
    argument, because each argument takes PyTorch half a microsecond.
    """

    @staticmethod
    def forward(ctx, input, z, weight, bias, settings):  # type: ignore[no-untyped-def, override]
        mean, variance, scale_shift, spec, exchange, output = settings
        launched = output is not None
        if not launched:
            output = normalise(input, z, Channels(mean, variance, weight, bias), spec, scale_shift)
        save(ctx, input, z, output, (mean, variance, weight, bias), spec, exchange, launched)
        return output

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def, override]
        gradients = saved_gradients if ctx.exchange is None else _saved_gradients_once
        return *gradients(ctx, dy, ctx.needs_input_grad[:4]), None


_saved_gradients_once = _library.once_differentiable(saved_gradients)
