"""`torch.ops.apex.norm_forward` and `norm_backward`: what `torch.compile` sees of the norms.

Operators return tensors, not None: an absent gradient is an empty tensor.
"""

from __future__ import annotations

import torch

from .. import _library
from .dispatch import norm_backward, norm_forward
from .spec import NormSpec


def _forward(input, weight, bias, row_length, eps, subtract_mean, memory_efficient, out_dtype):
    spec = NormSpec(row_length, eps, subtract_mean, memory_efficient)
    output, statistics = norm_forward(input, weight, bias, spec, out_dtype)
    return output.contiguous(), statistics


def _forward_fake(input, weight, bias, row_length, eps, subtract_mean, memory_efficient, out_dtype):
    rows = input.numel() // max(1, row_length)
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    statistics = input.new_empty((2 if subtract_mean else 1, rows), dtype=dtype)
    return input.new_empty(input.shape, dtype=out_dtype), statistics


def _backward(
    dy, saved, statistics, weight, bias, row_length, eps, subtract_mean, memory_efficient, dx_dtype, param_grads
):
    spec = NormSpec(row_length, eps, subtract_mean, memory_efficient)
    dx, dweight, dbias = norm_backward(dy, saved, statistics, weight, bias, spec, dx_dtype, param_grads)
    none = statistics.new_empty
    return dx.contiguous(), none(0) if dweight is None else dweight, none(0) if dbias is None else dbias


def _backward_fake(
    dy, saved, statistics, weight, bias, row_length, eps, subtract_mean, memory_efficient, dx_dtype, param_grads
):
    dx = saved.new_empty(saved.shape, dtype=dx_dtype)
    wanted = [
        p.new_empty(p.shape) if param_grads and p is not None else statistics.new_empty(0) for p in (weight, bias)
    ]
    return dx, *wanted


def _op_setup_context(ctx, inputs, output):
    input, weight, bias, row_length, eps, subtract_mean, memory_efficient, _ = inputs
    result, statistics = output
    ctx.spec = NormSpec(row_length, eps, subtract_mean, memory_efficient)
    ctx.input_dtype = input.dtype
    ctx.save_for_backward(result if memory_efficient else input, weight, bias, statistics)
    ctx.mark_non_differentiable(statistics)


def _op_backward(ctx, dy, dstatistics):
    saved, weight, bias, statistics = ctx.saved_tensors
    param_grads = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    dx, dweight, dbias = torch.ops.apex.norm_backward(
        dy, saved, statistics, weight, bias, *ctx.spec, ctx.input_dtype, param_grads
    )
    return (
        dx,
        _library.none_if_empty(dweight, weight),
        _library.none_if_empty(dbias, bias),
        None,
        None,
        None,
        None,
        None,
    )


def _refuse_second_derivative(ctx, *gradients):
    raise RuntimeError(
        "torch.ops.apex.norm_forward has a first derivative only; apex.ops.layer_norm and rms_norm have a second one"
    )


_library.register_op(
    "norm_forward(Tensor input, Tensor? weight, Tensor? bias, int row_length, float eps, bool subtract_mean, "
    "bool memory_efficient, ScalarType out_dtype) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    backward=_op_backward,
    setup_context=_op_setup_context,
)
_library.register_op(
    "norm_backward(Tensor dy, Tensor saved, Tensor statistics, Tensor? weight, Tensor? bias, int row_length, "
    "float eps, bool subtract_mean, bool memory_efficient, ScalarType dx_dtype, bool param_grads) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    backward=_refuse_second_derivative,
    setup_context=lambda ctx, inputs, output: None,
)
