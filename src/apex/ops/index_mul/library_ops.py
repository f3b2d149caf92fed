"""`torch.ops.apex.index_mul` and `index_mul_backward`: what `torch.compile` sees of products with indexed rows.

Operators return tensors, not None: a gradient that is not needed is an empty tensor.
"""

from __future__ import annotations

import torch

from .. import _library
from .op import index_mul_backward, index_mul_forward


def _forward(in1, in2, index):
    return index_mul_forward(in1, in2, index).contiguous()


def _forward_fake(in1, in2, index):
    return in2.new_empty(in2.shape)


def _backward(grad_out, in1, in2, index, need1, need2):
    gradients = index_mul_backward(grad_out, in1, in2, index, need1=need1, need2=need2)
    return tuple(in2.new_empty(0) if gradient is None else gradient.contiguous() for gradient in gradients)


def _backward_fake(grad_out, in1, in2, index, need1, need2):
    return in1.new_empty(in1.shape if need1 else 0), in2.new_empty(in2.shape if need2 else 0)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _op_backward(ctx, grad_out):
    need1, need2 = ctx.needs_input_grad[:2]
    grad1, grad2 = torch.ops.apex.index_mul_backward(grad_out, *ctx.saved_tensors, need1, need2)
    return grad1 if need1 else None, grad2 if need2 else None, None


def _refuse_second_derivative(ctx, *gradients):
    raise RuntimeError(
        "torch.ops.apex.index_mul has a first derivative only; apex.contrib.index_mul_2d.index_mul_2d has a second one"
    )


_library.register_op(
    "index_mul(Tensor in1, Tensor in2, Tensor index) -> Tensor",
    _forward,
    _forward_fake,
    backward=_op_backward,
    setup_context=_setup_context,
)
_library.register_op(
    "index_mul_backward(Tensor grad_out, Tensor in1, Tensor in2, Tensor index, bool need1, bool need2) "
    "-> (Tensor, Tensor)",
    _backward,
    _backward_fake,
    backward=_refuse_second_derivative,
    setup_context=lambda ctx, inputs, output: None,
)
