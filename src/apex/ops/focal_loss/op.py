"""Focal loss: checks, dispatch and autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import check_tensors
from . import reference
from .launches import triton_backward, triton_forward
from .reference import FocalSpec
from .self_check import self_check

FAMILY = _library.register_family(
    _library.OpFamily("focal_loss", "focal loss of a detector's classes, forward and backward", self_check)
)


def focal_loss_forward(logits: Tensor, targets: Tensor, num_positives: Tensor, spec: FocalSpec) -> Tensor:
    """The loss for arguments that were checked, without autograd: float32, or float64 for float64 logits."""
    if logits.numel() and _library.runs_triton(FAMILY, logits):
        return triton_forward(logits, targets, num_positives, spec)[0]
    return reference.forward(logits, targets, num_positives, spec)


def focal_loss_backward(
    grad_loss: Tensor, logits: Tensor, targets: Tensor, num_positives: Tensor, spec: FocalSpec
) -> Tensor:
    """The gradient of the logits for arguments that were checked."""
    if logits.numel() and _library.runs_triton(FAMILY, logits):
        return triton_backward(grad_loss, logits, targets, num_positives, spec)
    return reference.backward(grad_loss, logits, targets, num_positives, spec)


def focal_loss_and_gradient(
    logits: Tensor, targets: Tensor, num_positives: Tensor, spec: FocalSpec
) -> tuple[Tensor, Tensor]:
    """Loss and gradient in one pass; the gradient is that of the sum, not yet divided by the number of positives."""
    if logits.numel() and _library.runs_triton(FAMILY, logits):
        loss, gradient = triton_forward(logits, targets, num_positives, spec, want_grad=True)
        assert gradient is not None
        return loss, gradient
    loss, gradient = reference.loss_and_gradient(logits, targets, num_positives, spec)
    return loss, gradient.to(logits.dtype)


def forward_and_save(ctx: Any, logits: Tensor, targets: Tensor, num_positives: Tensor, spec: FocalSpec) -> Tensor:
    """The forward of the loss's autograd Function: keeps the logits, of which the kernels make the gradient later.

    Upstream computes the gradient along with the loss and keeps it. That reads and writes the size of the logits four
    times in all, this three times. Without kernels the arithmetic is the limit, and the gradient is kept here too.
    """
    check(logits, targets, num_positives, spec)
    gradient = None
    if torch.compiler.is_compiling():
        loss = torch.ops.apex.focal_loss(logits, targets, num_positives, *spec)
    elif not ctx.needs_input_grad[0] or _library.runs_triton(FAMILY, logits):
        loss = focal_loss_forward(logits, targets, num_positives, spec)
    else:
        loss, gradient = reference.loss_and_gradient(logits, targets, num_positives, spec)
    ctx.save_for_backward(logits, targets, num_positives, gradient)
    ctx.spec = spec
    return loss


def backward_from_saved(ctx: Any, grad_loss: Tensor) -> Tensor:
    """The backward of the loss's autograd Function: the gradient of the logits."""
    logits, targets, num_positives, gradient = ctx.saved_tensors
    if torch.compiler.is_compiling():
        return torch.ops.apex.focal_loss_backward(grad_loss, logits, targets, num_positives, *ctx.spec)
    if torch.is_grad_enabled():  # create_graph=True: the gradient itself must be differentiable
        with torch.enable_grad():
            loss = reference.forward(logits, targets, num_positives, ctx.spec)
            return torch.autograd.grad(loss, logits, grad_loss, create_graph=True)[0]
    if gradient is not None:
        return reference.scaled(gradient, grad_loss, num_positives, logits.dtype)
    return focal_loss_backward(grad_loss, logits, targets, num_positives, ctx.spec)


def check(logits: Tensor, targets: Tensor, num_positives: Tensor, spec: FocalSpec) -> None:
    """Refuses arguments that do not fit, in clear words; classes where looking at them waits for no device."""
    check_tensors(cls_output=logits, cls_targets_at_level=targets, num_positives_sum=num_positives)
    if logits.dim() != targets.dim() + 1 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"cls_output has shape {list(logits.shape)} and cls_targets_at_level {list(targets.shape)}; the first must "
            "have one more dimension, the classes"
        )
    if not logits.is_floating_point():
        raise TypeError(f"cls_output must be floating-point, got {logits.dtype}")
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"cls_targets_at_level must be int64 or int32, got {targets.dtype}")
    if num_positives.numel() != 1:
        raise ValueError(f"num_positives_sum must have one element, its shape is {list(num_positives.shape)}")
    if not 1 <= spec.classes <= logits.shape[-1]:
        raise ValueError(
            f"num_real_classes={spec.classes} must be between 1 and the last dimension of cls_output, whose shape is "
            f"{list(logits.shape)}"
        )
    if not logits.device == targets.device == num_positives.device:
        raise ValueError(
            f"cls_output is on {logits.device}, cls_targets_at_level on {targets.device}, num_positives_sum on "
            f"{num_positives.device}"
        )
    at_hand = type(targets) is Tensor and targets.device.type == "cpu" and not torch.compiler.is_compiling()
    if at_hand and targets.numel() and (highest := int(targets.max())) >= spec.classes:
        raise ValueError(
            f"cls_targets_at_level has class {highest}, expected less than num_real_classes={spec.classes}"
        )
