"""`torch.ops.apex.focal_loss` and `focal_loss_backward`: what `torch.compile` sees of the focal loss."""

from __future__ import annotations

import torch

from .. import _library
from .op import focal_loss_backward, focal_loss_forward
from .reference import FocalSpec, compute_dtype


def _forward(logits, targets, num_positives, classes, alpha, gamma, smoothing):
    return focal_loss_forward(logits, targets, num_positives, FocalSpec(classes, alpha, gamma, smoothing))


def _forward_fake(logits, targets, num_positives, classes, alpha, gamma, smoothing):
    return logits.new_empty((), dtype=compute_dtype(logits))


def _backward(grad_loss, logits, targets, num_positives, classes, alpha, gamma, smoothing):
    spec = FocalSpec(classes, alpha, gamma, smoothing)
    return focal_loss_backward(grad_loss, logits, targets, num_positives, spec).contiguous()


def _backward_fake(grad_loss, logits, targets, num_positives, classes, alpha, gamma, smoothing):
    return logits.new_empty(logits.shape)


def _setup_context(ctx, inputs, output):
    *tensors, classes, alpha, gamma, smoothing = inputs
    ctx.save_for_backward(*tensors)
    ctx.spec = FocalSpec(classes, alpha, gamma, smoothing)


def _op_backward(ctx, grad_loss):
    gradient = torch.ops.apex.focal_loss_backward(grad_loss, *ctx.saved_tensors, *ctx.spec)
    return gradient, None, None, None, None, None, None


def _refuse_second_derivative(ctx, *gradients):
    raise RuntimeError(
        "torch.ops.apex.focal_loss has a first derivative only; apex.contrib.focal_loss.focal_loss has a second one"
    )


_library.register_op(
    "focal_loss(Tensor logits, Tensor targets, Tensor num_positives, int classes, float alpha, float gamma, "
    "float smoothing) -> Tensor",
    _forward,
    _forward_fake,
    backward=_op_backward,
    setup_context=_setup_context,
)
_library.register_op(
    "focal_loss_backward(Tensor grad_loss, Tensor logits, Tensor targets, Tensor num_positives, int classes, "
    "float alpha, float gamma, float smoothing) -> Tensor",
    _backward,
    _backward_fake,
    backward=_refuse_second_derivative,
    setup_context=lambda ctx, inputs, output: None,
)
