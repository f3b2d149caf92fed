"""What `torch.compile` sees of the dense layers beside plain matrix products.

Operators return tensors, not None: an absent one is empty.
"""

from __future__ import annotations

from .. import _library
from .op import accumulate_now, activation_backward_now, gelu_linear_backward_now, gelu_linear_now


def _gelu_linear(input, weight, bias, keep):
    active, hidden = gelu_linear_now(input, weight, bias, keep)
    return active, active.new_empty(0) if hidden is None else hidden


def _gelu_linear_fake(input, weight, bias, keep):
    shape = (input.shape[0], weight.shape[0])
    return input.new_empty(shape), input.new_empty(shape if keep else 0)


def _gelu_linear_backward(dy, weight, hidden, bias_grad):
    dhidden, dbias = gelu_linear_backward_now(dy, weight, hidden, bias_grad)
    return dhidden, dy.new_empty(0) if dbias is None else dbias


def _gelu_linear_backward_fake(dy, weight, hidden, bias_grad):
    return dy.new_empty(hidden.shape), dy.new_empty(hidden.shape[1] if bias_grad else 0)


def _activation_backward(dy, saved, activation, bias_grad):
    dz, dbias = activation_backward_now(dy, saved, activation, bias_grad, in_place=False)
    return dz.contiguous(), dy.new_empty(0) if dbias is None else dbias


def _activation_backward_fake(dy, saved, activation, bias_grad):
    return dy.new_empty(dy.shape), dy.new_empty(dy.shape[1] if bias_grad else 0)


def _refuse_derivative(ctx, *gradients):
    raise RuntimeError(
        "operators of torch.ops.apex for dense layers have no derivatives; dense_gelu_dense and mlp of apex.ops.dense "
        "have, and second ones where they are not compiled"
    )


for _schema, _implementation, _fake in (
    (
        "gelu_linear(Tensor input, Tensor weight, Tensor? bias, bool keep) -> (Tensor, Tensor)",
        _gelu_linear,
        _gelu_linear_fake,
    ),
    (
        "gelu_linear_backward(Tensor dy, Tensor weight, Tensor hidden, bool bias_grad) -> (Tensor, Tensor)",
        _gelu_linear_backward,
        _gelu_linear_backward_fake,
    ),
    (
        "activation_backward(Tensor dy, Tensor saved, str activation, bool bias_grad) -> (Tensor, Tensor)",
        _activation_backward,
        _activation_backward_fake,
    ),
):
    _library.register_op(
        _schema,
        _implementation,
        _fake,
        backward=_refuse_derivative,
        setup_context=lambda ctx, inputs, output: None,
    )
_library.register_op(
    "wgrad_gemm_accum(Tensor input, Tensor d_output, Tensor(a!) d_weight) -> ()",
    accumulate_now,
    lambda input, d_output, d_weight: None,
)
