"""Layer norm and RMS norm: checks, choice of implementation, autograd."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library
from . import config, reference
from .launches import backward_plan, triton_backward, triton_forward
from .self_check import self_check

FAMILY = _library.register_family(
    _library.OpFamily("norm", "layer norm and RMS norm, forward and backward", self_check)
)


def norm_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    row_length: int,
    eps: float,
    subtract_mean: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Output, mean (None for RMS norm) and reciprocal deviation per row, without autograd."""
    if input.numel() and _library.runs_triton(FAMILY, input):
        return triton_forward(input, weight, bias, row_length, eps, subtract_mean, out_dtype)
    return reference.forward(input, weight, bias, row_length, eps, subtract_mean, out_dtype)


def norm_backward(
    dy: Tensor,
    saved: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    row_length: int,
    eps: float,
    subtract_mean: bool,
    from_output: bool,
    dx_dtype: torch.dtype,
    param_grads: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias from the saved input, or output when `from_output`."""
    run = triton_backward if saved.numel() and _library.runs_triton(FAMILY, saved) else reference.backward
    return run(dy, saved, mean, rstd, weight, bias, row_length, eps, subtract_mean, from_output, dx_dtype, param_grads)


def forward_and_save(
    ctx: Any,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float,
    memory_efficient: bool,
    subtract_mean: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """The forward of every norm's autograd Function."""
    row_length = math.prod(normalized_shape)
    plan = None
    if torch.compiler.is_compiling():
        output, mean, rstd = torch.ops.apex.norm_forward(
            input, weight, bias, row_length, eps, subtract_mean, memory_efficient, out_dtype
        )
    elif input.numel() and _library.runs_triton(FAMILY, input):
        output, mean, rstd = triton_forward(input, weight, bias, row_length, eps, subtract_mean, out_dtype)
        if (weight is None or weight.is_contiguous()) and (bias is None or bias.is_contiguous()):
            # Planned here because the thread that runs the backward pass does Python at half the speed.
            saved = output if memory_efficient else input
            wants_params = any(ctx.needs_input_grad[1:3])
            plan = backward_plan(
                saved,
                weight,
                bias,
                row_length,
                eps,
                subtract_mean,
                memory_efficient,
                out_dtype,
                input.dtype,
                wants_params,
            )
    else:
        output, mean, rstd = reference.forward(input, weight, bias, row_length, eps, subtract_mean, out_dtype)
    ctx.save_for_backward(output if memory_efficient else input, weight, bias, None if memory_efficient else mean, rstd)
    ctx.plan = plan
    ctx.constants = (row_length, eps, subtract_mean, memory_efficient, input.dtype)
    return output


def backward_from_saved(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The backward of every norm's autograd Function: gradients of input, weight and bias."""
    saved, weight, bias, mean, rstd = ctx.saved_tensors
    if ctx.plan is not None and not torch.is_grad_enabled():
        return ctx.plan.run(dy, saved, mean, rstd, weight, bias)
    arguments = (dy, saved, mean, rstd, weight, bias, *ctx.constants, any(ctx.needs_input_grad[1:3]))
    if torch.compiler.is_compiling():
        dx, dweight, dbias = torch.ops.apex.norm_backward(*arguments)
        return dx, none_if_empty(dweight, weight), none_if_empty(dbias, bias)
    if torch.is_grad_enabled():  # create_graph=True: the gradients themselves must be differentiable
        row_length, eps, subtract_mean, memory_efficient, _ = ctx.constants
        if memory_efficient:
            raise RuntimeError(
                "memory_efficient=True keeps only the output of the norm, which is not enough for a second derivative; "
                "use memory_efficient=False where create_graph=True is needed"
            )
        statistics = reference.statistics(saved, row_length, eps, subtract_mean)
        return reference.backward(dy, saved, *statistics, *arguments[4:])
    return norm_backward(*arguments)


class NormFunction(torch.autograd.Function):
    """The one autograd node behind `layer_norm` and `rms_norm`; takes the arguments of `forward_and_save`."""

    forward = staticmethod(forward_and_save)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        return *backward_from_saved(ctx, dy), None, None, None, None, None


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    memory_efficient: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Layer norm over the trailing `normalized_shape`, computed in float32.

    The output has `out_dtype` (default: the input's dtype). `memory_efficient` saves the output for the backward pass
    instead of the input, so that the input can be freed.
    """
    if weight is not None and out_dtype is None and not memory_efficient and _is_small(input, weight):
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        try:
            return torch.layer_norm(input, shape, weight, bias, eps)
        except RuntimeError:
            checked_shape(input, shape, weight, bias)  # says what is wrong in the same words as for large inputs
            raise
    shape = checked_shape(input, normalized_shape, weight, bias)
    return _norm(input, shape, weight, bias, eps, memory_efficient, True, out_dtype)


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float = 1e-5,
    *,
    memory_efficient: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """RMS norm over the trailing `normalized_shape`; arguments as for `layer_norm`."""
    if weight is not None and out_dtype is None and not memory_efficient and _is_small(input, weight):
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        try:
            return torch.rms_norm(input, shape, weight, eps)
        except RuntimeError:
            checked_shape(input, shape, weight, None)
            raise
    shape = checked_shape(input, normalized_shape, weight, None)
    return _norm(input, shape, weight, None, eps, memory_efficient, False, out_dtype)


def _is_small(input: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch's own operator is the quicker way to the same result, the host being the limit.

    The first thing a small norm runs into, so it asks the cheapest questions only. Under autocast PyTorch's operator
    would return float32.
    """
    return (
        not torch._C._get_tracing_state()
        and input.numel() < config.NATIVE_BELOW
        and input.dtype == weight.dtype
        and (input.is_cuda or input.dtype == torch.float32)
        and not torch._C._is_any_autocast_enabled()
        and _library.requested() == "auto"
    )


def _norm(
    input: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    memory_efficient: bool,
    subtract_mean: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    out_dtype = out_dtype or input.dtype
    # torch.jit.trace sees operators, not kernel launches.
    if (
        not torch._C._get_tracing_state()
        and input.numel()
        and (memory_efficient or _library.runs_triton(FAMILY, input))
    ):
        return NormFunction.apply(input, weight, bias, shape, eps, memory_efficient, subtract_mean, out_dtype)
    # No kernel here: PyTorch's operator, for mixed dtypes in one that holds both.
    compute = input.dtype if weight is None else torch.promote_types(input.dtype, weight.dtype)
    if subtract_mean and input.device.type == "cpu" and torch.is_grad_enabled():
        # The CPU's layer norm sums the gradients of half-precision weights in half precision: 5% off after 4096 rows.
        # In float32 they are right, and a training step is a quarter quicker.
        compute = torch.promote_types(compute, torch.float32)
    wide = [None if tensor is None else tensor.to(compute) for tensor in (input, weight, bias)]
    with _autocast_off(input):
        if subtract_mean:
            output = torch.layer_norm(wide[0], shape, wide[1], wide[2], eps)  # type: ignore[arg-type]
        else:
            output = torch.rms_norm(wide[0], shape, wide[1], eps)  # type: ignore[arg-type]
    return output.to(out_dtype)


def _autocast_off(input: Tensor) -> contextlib.AbstractContextManager:
    """The norms cast as they see fit; autocast inside them would return float32."""
    device_type = input.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def checked_shape(
    input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> Sequence[int]:
    """`normalized_shape` as a sequence, after every argument was found fit."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
    if torch._C._get_tracing_state():  # sizes are tensors then; PyTorch's operator checks them
        return tuple(shape)
    if (
        shape
        and input.shape[-len(shape) :] == shape
        and input.is_floating_point()
        and (weight is None or (weight.shape == shape and weight.device == input.device))
        and (bias is None or (weight is not None and bias.shape == shape and bias.device == input.device))
    ):
        return shape
    return _shape_or_error(input, tuple(shape), weight, bias)


def _shape_or_error(
    input: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None
) -> tuple[int, ...]:
    """The slow path of `checked_shape`: says what is wrong, or accepts a list where a tuple was expected."""
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"normalized_shape={list(shape)} must be the trailing dimensions of the input, whose shape is "
            f"{list(input.shape)}"
        )
    if not input.is_floating_point():
        raise TypeError(f"a norm needs a floating-point input, got {input.dtype}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if tuple(parameter.shape) != shape:
            raise ValueError(f"{name} has shape {list(parameter.shape)}, expected normalized_shape={list(shape)}")
        if parameter.device != input.device:
            raise ValueError(f"{name} is on {parameter.device}, the input on {input.device}")
        if not parameter.is_floating_point():
            raise TypeError(f"{name} must be floating-point, got {parameter.dtype}")
    if bias is not None and weight is None:
        raise ValueError("a bias needs a weight beside it")
    return shape


def none_if_empty(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    """An operator must return a tensor; an empty one stands for the gradient of nothing."""
    return None if parameter is None or gradient.numel() != parameter.numel() else gradient
