"""`torch.ops.apex.xentropy_forward`, `xentropy_backward` and `linear_xentropy`: what `torch.compile` sees."""

from __future__ import annotations

import torch

from .. import _library
from .linear_chunks import Wanted, linear_xentropy
from .op import xentropy_backward, xentropy_forward
from .reference import compute_dtype


def _forward_fake(logits, labels, smoothing, padding_idx):
    losses = logits.new_empty(labels.shape, dtype=compute_dtype(logits))
    return losses, torch.empty_like(losses)


def _backward_fake(loss_gradient, logits, log_sums, labels, smoothing, padding_idx):
    return logits.new_empty(logits.shape)


def _setup_context(ctx, inputs, output):
    logits, labels, ctx.smoothing, ctx.padding_idx = inputs
    ctx.save_for_backward(logits, labels, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, loss_gradient, _):
    logits, labels, log_sums = ctx.saved_tensors
    gradient = torch.ops.apex.xentropy_backward(loss_gradient, logits, log_sums, labels, ctx.smoothing, ctx.padding_idx)
    return gradient, None, None, None


def _refuse_second_derivative(ctx, *gradients):
    raise RuntimeError(
        "torch.ops.apex.xentropy_forward has a first derivative only; "
        "apex.contrib.xentropy.SoftmaxCrossEntropyLoss has a second one"
    )


_library.register_op(
    "xentropy_forward(Tensor logits, Tensor labels, float smoothing, int padding_idx) -> (Tensor, Tensor)",
    xentropy_forward,
    _forward_fake,
    backward=_backward,
    setup_context=_setup_context,
)
_library.register_op(
    "xentropy_backward(Tensor loss_gradient, Tensor logits, Tensor log_sums, Tensor labels, float smoothing, "
    "int padding_idx) -> Tensor",
    xentropy_backward,
    _backward_fake,
    backward=_refuse_second_derivative,
    setup_context=lambda ctx, inputs, output: None,
)


def _linear(input, weight, bias, labels, row_scale, smoothing, ignore_index, wanted, accumulation_dtype, chunk_rows):
    arguments = (row_scale, smoothing, ignore_index, Wanted(*wanted), accumulation_dtype, chunk_rows)
    found = linear_xentropy(input, weight, bias, labels, *arguments)
    # An operator must return tensors; an empty one stands for a gradient that was not wanted.
    return tuple(input.new_empty(0) if tensor is None else tensor for tensor in found)


def _linear_fake(
    input, weight, bias, labels, row_scale, smoothing, ignore_index, wanted, accumulation_dtype, chunk_rows
):
    losses = input.new_empty(labels.shape, dtype=compute_dtype(input))
    input_gradient = input.new_empty(input.shape if wanted[0] else (0,))
    parameters = (weight.shape, weight.shape[:1])
    gradients = (
        input.new_empty(shape, dtype=accumulation_dtype) if want else input.new_empty(0)
        for shape, want in zip(parameters, wanted[1:], strict=True)
    )
    return losses, input_gradient, *gradients


_library.register_op(
    "linear_xentropy(Tensor input, Tensor weight, Tensor? bias, Tensor labels, Tensor? row_scale, float smoothing, "
    "int ignore_index, bool[] wanted, ScalarType accumulation_dtype, SymInt chunk_rows) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _linear,
    _linear_fake,
)
