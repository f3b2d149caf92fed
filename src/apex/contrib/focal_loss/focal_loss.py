"""`focal_loss`: the sigmoid focal loss of a detector's class scores, summed and divided by the number of positives."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops._checks import check_tensors, number
from ...ops.focal_loss import FOCAL_LOSS, check


class FocalLoss(torch.autograd.Function):
    """The autograd node behind `focal_loss`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, cls_output, cls_targets_at_level, num_positives_sum, num_real_classes, alpha, gamma, label_smoothing=0.0
    ):
        check(cls_output, cls_targets_at_level, num_positives_sum, num_real_classes)
        floats = (number("alpha", alpha), number("gamma", gamma), number("label_smoothing", label_smoothing))
        settings = (num_real_classes, *floats)
        return FOCAL_LOSS.forward_and_save(ctx, cls_output, cls_targets_at_level, num_positives_sum, *settings)

    @staticmethod
    def backward(ctx, grad_loss):  # type: ignore[override]
        return *FOCAL_LOSS.backward_from_saved(ctx, grad_loss), None, None, None, None, None, None


def focal_loss(
    cls_output: Tensor,
    cls_targets_at_level: Tensor,
    num_positive_sum: Tensor,
    num_real_classes: int,
    alpha: float,
    gamma: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the focal loss as one float32 (float64 for float64 scores).

    `cls_output` holds the scores before the sigmoid, with classes in its last dimension; classes from
    `num_real_classes` on are padding and are ignored. `cls_targets_at_level` has one class per anchor: -1 for
    background, -2 for an anchor to ignore. `num_positive_sum` is a tensor of one element, the divisor.
    """
    check_tensors(num_positive_sum=num_positive_sum)
    if num_positive_sum.numel() != 1:
        raise ValueError(f"num_positive_sum must have one element, its shape is {list(num_positive_sum.shape)}")
    return FocalLoss.apply(
        cls_output, cls_targets_at_level, num_positive_sum, num_real_classes, alpha, gamma, label_smoothing
    )
