"""Upstream's compiled module of this name: focal loss with its gradient in one pass, without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from apex.ops.focal_loss import check, loss_and_gradient_of_sum


def forward(
    cls_output, cls_targets_at_level, num_positives_sum, num_real_classes, alpha, gamma, smoothing_factor
) -> list[Tensor]:
    """Return the loss, and the scores' gradient before its division by the number of positives."""
    check(cls_output, cls_targets_at_level, num_positives_sum, num_real_classes)
    settings = (num_real_classes, float(alpha), float(gamma), float(smoothing_factor))
    return list(loss_and_gradient_of_sum(cls_output, cls_targets_at_level, num_positives_sum, *settings))


def backward(grad_output: Tensor, partial_grad: Tensor, num_positives_sum: Tensor) -> Tensor:
    """Multiply `partial_grad` by grad_output / num_positives_sum, in place like upstream's."""
    compute = torch.promote_types(partial_grad.dtype, torch.float32)
    scale = grad_output.to(compute).reshape(()) / num_positives_sum.to(compute).reshape(())
    return partial_grad.copy_(partial_grad.to(compute) * scale)
