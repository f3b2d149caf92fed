"""`torch.ops.apex.glu_forward` and `glu_backward`: what `torch.compile` sees of the gated linear units.

Operators return tensors, not None: the gradient of an absent bias is an empty tensor.
"""

from __future__ import annotations

import torch

from .. import _library
from .op import glu_backward, glu_forward


def _forward(input, bias, activation):
    return glu_forward(input, bias, activation).contiguous()


def _forward_fake(input, bias, activation):
    return input.new_empty((*input.shape[:-1], input.shape[-1] // 2))


def _backward(dy, input, bias, activation, bias_grad):
    dinput, dbias = glu_backward(dy, input, bias, activation, bias_grad)
    return dinput.contiguous(), input.new_empty(0) if dbias is None else dbias


def _backward_fake(dy, input, bias, activation, bias_grad):
    dbias = input.new_empty(0) if bias is None or not bias_grad else bias.new_empty(bias.shape)
    return input.new_empty(input.shape), dbias


def _setup_context(ctx, inputs, output):
    input, bias, ctx.activation = inputs
    ctx.save_for_backward(input, bias)


def _op_backward(ctx, dy):
    input, bias = ctx.saved_tensors
    bias_grad = bias is not None and ctx.needs_input_grad[1]
    dinput, dbias = torch.ops.apex.glu_backward(dy, input, bias, ctx.activation, bias_grad)
    return dinput, dbias if bias_grad else None, None


def _refuse_second_derivative(ctx, *gradients):
    raise RuntimeError("torch.ops.apex.glu_forward has a first derivative only; apex.ops.glu.bias_glu has a second one")


_library.register_op(
    "glu_forward(Tensor input, Tensor? bias, str activation) -> Tensor",
    _forward,
    _forward_fake,
    backward=_op_backward,
    setup_context=_setup_context,
)
_library.register_op(
    "glu_backward(Tensor dy, Tensor input, Tensor? bias, str activation, bool bias_grad) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
    backward=_refuse_second_derivative,
    setup_context=lambda ctx, inputs, output: None,
)
