"""`torch.ops.apex.softmax_forward` and `softmax_backward`: what `torch.compile` sees of the softmax.

Without dropout the probabilities are the output, and an empty tensor is returned in their place.
"""

from __future__ import annotations

import torch

from .. import _library
from .op import softmax_backward, softmax_forward
from .spec import SoftmaxSpec


def _forward(input, mask, noise, scale, causal, dropout):
    output, probabilities = softmax_forward(input, mask, SoftmaxSpec(scale, causal, dropout), noise)
    return output.contiguous(), input.new_empty(0) if noise is None else probabilities.contiguous()


def _forward_fake(input, mask, noise, scale, causal, dropout):
    return input.new_empty(input.shape), input.new_empty(0 if noise is None else input.shape)


def _backward(dy, probabilities, noise, scale, causal, dropout):
    return softmax_backward(dy, probabilities, SoftmaxSpec(scale, causal, dropout), noise).contiguous()


def _backward_fake(dy, probabilities, noise, scale, causal, dropout):
    return probabilities.new_empty(probabilities.shape)


def _setup_context(ctx, inputs, output):
    noise = inputs[2]
    result, probabilities = output
    ctx.spec = SoftmaxSpec(*inputs[3:])
    ctx.save_for_backward(result if noise is None else probabilities, noise)
    ctx.mark_non_differentiable(probabilities)


def _op_backward(ctx, dy, dprobabilities):
    probabilities, noise = ctx.saved_tensors
    return torch.ops.apex.softmax_backward(dy, probabilities, noise, *ctx.spec), None, None, None, None, None


def _refuse_second_derivative(ctx, *gradients):
    raise RuntimeError(
        "torch.ops.apex.softmax_forward has a first derivative only; apex.ops.softmax.masked_softmax has a second one"
    )


_library.register_op(
    "softmax_forward(Tensor input, Tensor? mask, Tensor? noise, float scale, bool causal, float dropout) "
    "-> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    backward=_op_backward,
    setup_context=_setup_context,
)
_library.register_op(
    "softmax_backward(Tensor dy, Tensor probabilities, Tensor? noise, float scale, bool causal, float dropout) "
    "-> Tensor",
    _backward,
    _backward_fake,
    backward=_refuse_second_derivative,
    setup_context=lambda ctx, inputs, output: None,
)
