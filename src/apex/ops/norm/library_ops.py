"""`torch.ops.apex.norm_forward` and `norm_backward`: what `torch.compile` sees of the norms.

Operators return tensors, not None: an absent mean or gradient is an empty tensor.
"""

from __future__ import annotations

import torch

from .. import _library
from .autograd import none_if_empty
from .dispatch import norm_backward, norm_forward


def _forward(input, weight, bias, row_length, eps, subtract_mean, memory_efficient, out_dtype):
    output, mean, rstd = norm_forward(input, weight, bias, row_length, eps, subtract_mean, out_dtype)
    return output.contiguous(), rstd.new_empty(0) if mean is None else mean, rstd


def _forward_fake(input, weight, bias, row_length, eps, subtract_mean, memory_efficient, out_dtype):
    rows = input.numel() // max(1, row_length)
    statistics = torch.float64 if input.dtype == torch.float64 else torch.float32
    mean = input.new_empty(rows if subtract_mean else 0, dtype=statistics)
    return input.new_empty(input.shape, dtype=out_dtype), mean, input.new_empty(rows, dtype=statistics)


def _backward(dy, saved, mean, rstd, weight, bias, row_length, eps, subtract_mean, from_output, dx_dtype, param_grads):
    mean = None if mean is None or mean.numel() != rstd.numel() else mean
    dx, dweight, dbias = norm_backward(
        dy, saved, mean, rstd, weight, bias, row_length, eps, subtract_mean, from_output, dx_dtype, param_grads
    )
    return dx.contiguous(), *(rstd.new_empty(0) if gradient is None else gradient for gradient in (dweight, dbias))


def _backward_fake(
    dy, saved, mean, rstd, weight, bias, row_length, eps, subtract_mean, from_output, dx_dtype, param_grads
):
    dx = saved.new_empty(saved.shape, dtype=dx_dtype)
    wanted = [p.new_empty(p.shape) if param_grads and p is not None else rstd.new_empty(0) for p in (weight, bias)]
    return dx, *wanted


def _op_setup_context(ctx, inputs, output):
    input, weight, bias, ctx.row_length, ctx.eps, ctx.subtract_mean, ctx.memory_efficient, _ = inputs
    result, mean, rstd = output
    ctx.input_dtype = input.dtype
    ctx.save_for_backward(result if ctx.memory_efficient else input, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)


def _op_backward(ctx, dy, dmean, drstd):
    saved, weight, bias, mean, rstd = ctx.saved_tensors
    dx, dweight, dbias = torch.ops.apex.norm_backward(
        dy,
        saved,
        mean,
        rstd,
        weight,
        bias,
        ctx.row_length,
        ctx.eps,
        ctx.subtract_mean,
        ctx.memory_efficient,
        ctx.input_dtype,
        any(ctx.needs_input_grad[1:3]),
    )
    return dx, none_if_empty(dweight, weight), none_if_empty(dbias, bias), None, None, None, None, None


def _refuse_second_derivative(ctx, *gradients):
    raise RuntimeError(
        "torch.ops.apex.norm_forward has a first derivative only; apex.ops.layer_norm and rms_norm have a second one"
    )


_library.register_op(
    "norm_forward(Tensor input, Tensor? weight, Tensor? bias, int row_length, float eps, bool subtract_mean, "
    "bool memory_efficient, ScalarType out_dtype) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    backward=_op_backward,
    setup_context=_op_setup_context,
)
_library.register_op(
    "norm_backward(Tensor dy, Tensor saved, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, int row_length, "
    "float eps, bool subtract_mean, bool from_output, ScalarType dx_dtype, bool param_grads) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    backward=_refuse_second_derivative,
    setup_context=lambda ctx, inputs, output: None,
)
