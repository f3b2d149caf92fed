"""`batch_norm`: checks, dispatch, autograd and registration with `torch.library`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._plans import Plans, kind
from . import reference, stages
from .autograd import apply_node, apply_planned
from .kernel_norm import NormPlan
from .layout import dense, laid_out_like
from .spec import BatchNormSpec, BatchStatistics
from .stages import FAMILY


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
    channel_dim: int = 1,
) -> Tensor:
    """Batch norm of `input`, plus `z` where it is given, then ReLU where it is asked for.

    `input` is [N, C, ...] in any memory format, or [N, ..., C] with `channel_dim=-1`. In `training` the statistics are
    those of the input and the running ones, where there are any, move towards them by `momentum`; otherwise the running
    ones are used. The running variance is the unbiased one; a single value per channel counts as its own. Statistics
    are float32 (float64 for float64), whatever the dtype of the input, which is that of the output.
    """
    spec = BatchNormSpec(float(eps), float(momentum), bool(training), bool(relu), channel_dim)
    return batch_norm_with_statistics(input, z, running_mean, running_var, weight, bias, spec, wanted=False)[0]


def batch_norm_with_statistics(
    input: Tensor,
    z: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
    wanted: bool = True,
) -> tuple[Tensor, BatchStatistics | None]:
    """The same, and in training, where they are `wanted`, the statistics of the batch, detached from the graph."""
    if _library.may_plan(input):
        parameters = (kind(weight), kind(bias), kind(running_mean), kind(running_var))
        key = (_kind(input), None if z is None else _kind(z), *parameters, spec)
        plan = _plans.get(key, _UNKNOWN)
        if plan is _UNKNOWN:
            check(input, running_mean, running_var, weight, bias, z, spec)
            plan = _plans.keep(key, _plan_for(input, z, running_mean, running_var, weight, bias, spec))
        if plan is not None:
            return _run(plan, input, z, running_mean, running_var, weight, bias)
    else:
        check(input, running_mean, running_var, weight, bias, z, spec)
    if not input.numel() or (spec.training and input.numel() == input.shape[spec.channel_dim]):
        return _by_reference(input, z, running_mean, running_var, weight, bias, spec)
    if not (_runs_kernels(input, z, spec) or _torch_rounds(input, weight, bias, spec)):
        return _native(input, z, running_mean, running_var, weight, bias, spec, wanted and spec.training)
    if torch.compiler.is_compiling():
        return _registered(input, z, running_mean, running_var, weight, bias, spec)
    values = dense(input, spec)
    z = None if z is None else laid_out_like(values, z)
    output, mean, variance = apply_node(values, z, weight, bias, running_mean, running_var, spec)
    return output, BatchStatistics(mean, variance, False) if spec.training else None


def _kind(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


_UNKNOWN: Any = object()
_plans: Plans[NormPlan | None] = Plans()


def _plan_for(
    input: Tensor,
    z: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
) -> NormPlan | None:
    """How kernels compute the norm; None where PyTorch's operators do or must first make something of a tensor."""
    if not input.numel() or (spec.training and input.numel() == input.shape[spec.channel_dim]):
        return None
    running = (running_mean, running_var)
    if (
        not _runs_kernels(input, z, spec)
        or (z is not None and z.stride() != input.stride())
        or not all(each is None or each.is_contiguous() for each in running)
    ):
        return None
    norm = stages.direct_norm(input, weight, bias, spec)
    if norm is None:
        return None
    dtypes = [None if each is None else each.dtype for each in (z, *running)]
    return NormPlan(norm, spec, input.dtype, dtypes[0], (dtypes[1], dtypes[2]))


def _run(
    plan: NormPlan,
    input: Tensor,
    z: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, BatchStatistics | None]:
    output, mean, variance = found = plan.forward(input, z, weight, bias, running_mean, running_var)
    if torch.is_grad_enabled():
        output = apply_planned(input, z, weight, bias, plan, found)
    return output, BatchStatistics(mean, variance, False) if plan.spec.training else None


def average_factor(momentum: float | None, num_batches_tracked: Tensor | None) -> float:
    """The weight of the next batch in running statistics: the momentum, or where that is None an equal share.

    As in PyTorch, an equal share counts the batches, and waits for the device to do so.
    """
    if momentum is not None:
        return momentum
    if num_batches_tracked is None:
        return 0.0
    num_batches_tracked.add_(1)
    return 1.0 / float(num_batches_tracked)


def check(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    spec: BatchNormSpec,
) -> None:
    """Raises for arguments that do not fit each other."""
    if spec.channel_dim not in (1, -1):
        raise ValueError(f"channel_dim={spec.channel_dim} is not known; 1 for [N, C, ...] and -1 for [N, ..., C] are")
    if input.dim() < 2:
        raise ValueError(
            f"input has shape {list(input.shape)}; images and channels, at least two dimensions, are needed"
        )
    if not input.is_floating_point():
        raise TypeError(f"batch_norm needs a floating-point input, got {input.dtype}")
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var must be given together, or neither of them")
    if running_mean is None and not spec.training:
        raise ValueError("running_mean and running_var are needed where training is False")
    channels = input.shape[spec.channel_dim]
    named = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    for name, parameter in named.items():
        if parameter is None:
            continue
        if parameter.shape != (channels,):
            raise ValueError(
                f"{name} has shape {list(parameter.shape)}, expected one value for each of {channels} channels"
            )
        if parameter.device != input.device:
            raise ValueError(f"{name} is on {parameter.device}, the input on {input.device}")
        if not parameter.is_floating_point():
            raise TypeError(f"{name} must be floating-point, got {parameter.dtype}")
    if z is not None:
        if z.shape != input.shape:
            raise ValueError(f"z has shape {list(z.shape)}, the input {list(input.shape)}")
        if z.device != input.device:
            raise ValueError(f"z is on {z.device}, the input on {input.device}")
        if not z.is_floating_point():
            raise TypeError(f"z must be floating-point, got {z.dtype}")


def _runs_kernels(input: Tensor, z: Tensor | None, spec: BatchNormSpec) -> bool:
    """Not for few elements, nor where nothing follows the norm, unless it is one that PyTorch is slow or inexact at."""
    if not _library.runs_triton(FAMILY, input):
        return False
    if _library.requested() == "triton":
        return True
    if z is not None and input.element_size() <= 2:
        return True  # PyTorch would round the norm before it adds
    if input.numel() < stages.NATIVE_BELOW:
        return False
    if spec.relu or z is not None:
        return True
    contiguous = spec.training and spec.channel_dim == 1 and input.dim() > 2 and input.is_contiguous()
    return contiguous and input.shape[2:].numel() >= stages.PLAIN_POSITIONS


def _torch_rounds(input: Tensor, weight: Tensor | None, bias: Tensor | None, spec: BatchNormSpec) -> bool:
    """Whether kernels are wanted because PyTorch's gradients would be inexact, or cost copies to be exact."""
    if input.element_size() > 2 or _library.requested() == "torch" or not _library.runs_triton(FAMILY, input):
        return False
    learning = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (input, weight, bias))
    return learning and spec.training and not _keeps_float32(input if spec.channel_dim == 1 else input.movedim(-1, 1))


def _keeps_float32(values: Tensor) -> bool:
    """Whether PyTorch's batch norm of [N, C, ...] computes all of its gradients in float32.

    On a GPU it does for channels-last images and where cuDNN takes them, which refuses contiguous bfloat16, on a CPU
    for images and contiguous tensors; anywhere else it rounds to half precision between the steps of the backward pass.
    """
    if values.element_size() > 2:
        return True
    if not values.is_cuda:
        return values.dim() == 4 or values.is_contiguous()
    if values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last):
        return True
    return values.dtype == torch.float16 and values.dim() in (4, 5) and torch.backends.cudnn.enabled


def _by_reference(
    input: Tensor,
    z: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
) -> tuple[Tensor, BatchStatistics | None]:
    """Inputs with at most one value per channel, which PyTorch's operator refuses or answers with NaN."""
    if spec.training:
        mean, variance = reference.statistics(input, spec)
        found = BatchStatistics(mean.detach(), variance.detach(), False)
        if running_mean is not None and running_var is not None and input.numel():
            reference.update_running(running_mean, running_var, *found[:2], 1, spec.momentum)
        return reference.apply(input, z, mean, variance, weight, bias, spec), found
    assert running_mean is not None  # checked
    assert running_var is not None
    return reference.apply(input, z, running_mean, running_var, weight, bias, spec), None


def _native(
    input: Tensor,
    z: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
    wanted: bool,
) -> tuple[Tensor, BatchStatistics | None]:
    """PyTorch's operators, which take parameters in float32 beside any input, and in its dtype otherwise."""
    wide = torch.promote_types(input.dtype, torch.float32)
    if z is not None and input.dtype != wide:  # rounded once, behind the sum
        plain = spec._replace(relu=False)
        output, found = _native(input.to(wide), z, running_mean, running_var, weight, bias, plain, wanted)
        output = output.to(input.dtype)
        return output.relu_() if spec.relu else output, found
    weight, bias = _cast(weight, wide), _cast(bias, wide)
    mean, variance = _cast(running_mean, wide), _cast(running_var, wide)
    values = input if spec.channel_dim == 1 else input.movedim(-1, 1)
    if input.dtype != wide:  # without parameters to tell, statistics would be rounded to the dtype of the input
        weight = values.new_ones(values.shape[1], dtype=wide) if weight is None else weight
        bias = values.new_zeros(values.shape[1], dtype=wide) if bias is None else bias
    channels_last_shape = None
    if not _keeps_float32(values):  # one long image with channels last
        rows = values.movedim(1, -1)
        channels_last_shape, contiguous = rows.shape, values.is_contiguous()
        values = rows.reshape(1, -1, 1, rows.shape[-1]).movedim(-1, 1)
    flags = (spec.training, spec.momentum, spec.eps, torch.backends.cudnn.enabled)
    found = None
    if wanted:  # what torch.batch_norm calls, which also tells the statistics of the batch
        output, batch_mean, inverse, *_ = torch._batch_norm_impl_index(values, weight, bias, mean, variance, *flags)
        found = BatchStatistics(batch_mean.detach(), inverse.detach(), True)
    else:
        output = torch.batch_norm(values, weight, bias, mean, variance, *flags)
    if spec.training:
        for running, updated in ((running_mean, mean), (running_var, variance)):
            if running is not None and updated is not None and updated is not running:
                running.copy_(updated)
    if channels_last_shape is not None:
        output = output.movedim(1, -1).reshape(channels_last_shape).movedim(-1, 1)
        output = output.contiguous() if contiguous else output
    output = output if spec.channel_dim == 1 else output.movedim(1, -1)
    # In place: no derivative of a batch norm asks for its output.
    if z is not None:
        output = output.add_(z.to(output.dtype))
    return output.relu_() if spec.relu else output, found


def _cast(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """In `dtype` and contiguous: PyTorch's backward pass on a CPU reads what lies beside a strided weight, too."""
    if parameter is None or (parameter.dtype == dtype and parameter.is_contiguous()):
        return parameter
    return parameter.to(dtype).contiguous()


def _registered(
    input: Tensor,
    z: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
) -> tuple[Tensor, BatchStatistics | None]:
    """The registered operators, which change nothing they are given, and running statistics by PyTorch's."""
    flags = (spec.eps, spec.training, spec.relu, spec.channel_dim)
    if not spec.training:
        return torch.ops.apex.batch_norm_normalise(input, z, running_mean, running_var, weight, bias, *flags), None
    mean, variance = torch.ops.apex.batch_norm_statistics(input.detach(), spec.channel_dim)
    if running_mean is not None and running_var is not None:
        count = input.numel() // input.shape[spec.channel_dim]
        reference.update_running(running_mean, running_var, mean, variance, count, spec.momentum)
    output = torch.ops.apex.batch_norm_normalise(input, z, mean, variance, weight, bias, *flags)
    return output, BatchStatistics(mean, variance, False)


def _statistics(input, channel_dim):
    return stages.local_statistics(input, BatchNormSpec(channel_dim=channel_dim))


def _statistics_fake(input, channel_dim):
    dtype = reference.compute_dtype(input)
    return tuple(input.new_empty((input.shape[channel_dim],), dtype=dtype) for _ in range(2))


def _spec(eps, training, relu, channel_dim):
    return BatchNormSpec(eps, 0.0, training, relu, channel_dim)


def _normalise(input, z, mean, variance, weight, bias, eps, training, relu, channel_dim):
    spec = _spec(eps, training, relu, channel_dim)
    output = stages.normalise(input, z, mean, variance, weight, bias, spec)
    return laid_out_like(torch.empty_like(input), output)


def _normalise_fake(input, z, mean, variance, weight, bias, eps, training, relu, channel_dim):
    return torch.empty_like(input)


def _backward(dy, input, output, mean, variance, weight, bias, eps, training, relu, channel_dim, has_z):
    spec = _spec(eps, training, relu, channel_dim)
    keeps = has_z and relu  # otherwise the addend's gradient is `dy`, which an operator may not return
    dx, dz, dweight, dbias = stages.gradients(dy, input, output, mean, variance, weight, bias, spec, keeps)
    like = torch.empty_like(input)
    dz = dy.new_empty(0) if dz is None else laid_out_like(like, dz)
    return laid_out_like(like, dx), dz, dweight, dbias


def _backward_fake(dy, input, output, mean, variance, weight, bias, eps, training, relu, channel_dim, has_z):
    dz = torch.empty_like(input, dtype=dy.dtype) if has_z and relu else dy.new_empty(0)
    dtype = reference.compute_dtype(dy, input)
    return torch.empty_like(input), dz, *(input.new_empty(mean.shape, dtype=dtype) for _ in range(2))


def _setup_context(ctx, inputs, output):
    input, z, mean, variance, weight, bias, *flags = inputs
    spec = _spec(*flags)
    ctx.spec, ctx.z_dtype = spec, None if z is None else z.dtype
    ctx.save_for_backward(input, output if spec.relu and z is not None else None, mean, variance, weight, bias)


def _op_backward(ctx, dy):
    input, output, mean, variance, weight, bias = ctx.saved_tensors
    spec, wants_z = ctx.spec, ctx.needs_input_grad[1]
    flags = (spec.eps, spec.training, spec.relu, spec.channel_dim)
    dx, dz, dweight, dbias = torch.ops.apex.batch_norm_backward(
        dy, input, output, mean, variance, weight, bias, *flags, wants_z
    )
    dz = (dz if spec.relu else dy).to(ctx.z_dtype) if wants_z else None
    dweight = None if weight is None else dweight.to(weight.dtype)
    dbias = None if bias is None else dbias.to(bias.dtype)
    return dx, dz, None, None, dweight, dbias, None, None, None, None


def _refuse_second_derivative(ctx, *gradients):
    raise RuntimeError(
        "torch.ops.apex.batch_norm_normalise has a first derivative only; apex.ops.batch_norm has a second one"
    )


_library.register_op(
    "batch_norm_statistics(Tensor input, int channel_dim) -> (Tensor, Tensor)", _statistics, _statistics_fake
)
_library.register_op(
    "batch_norm_normalise(Tensor input, Tensor? z, Tensor mean, Tensor variance, Tensor? weight, Tensor? bias, "
    "float eps, bool training, bool relu, int channel_dim) -> Tensor",
    _normalise,
    _normalise_fake,
    backward=_op_backward,
    setup_context=_setup_context,
)
_library.register_op(
    "batch_norm_backward(Tensor dy, Tensor input, Tensor? output, Tensor mean, Tensor variance, Tensor? weight, "
    "Tensor? bias, float eps, bool training, bool relu, int channel_dim, bool has_z) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    backward=_refuse_second_derivative,
    setup_context=lambda ctx, inputs, output: None,
)
