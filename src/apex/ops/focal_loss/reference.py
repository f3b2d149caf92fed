"""Focal loss in PyTorch operators: the definition, and the implementation where there is no kernel.

Letters: A anchors, C classes, of which the first `classes` are real and the others padding. A target is the class of
its anchor; any negative one means that all classes are wrong, except IGNORED: such an anchor does not count. Runs on
any device in any floating dtype; half precision is computed in float32, float64 in float64.

With p the probability that the classifier gives to the wrong answer (of a class being there or not), an element's loss
is weight * p**gamma * cross-entropy, where the weight is alpha for the right class and 1 - alpha for the others, and
label smoothing moves the wanted probabilities from 0 and 1 to smoothing/2 and 1 - smoothing/2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

IGNORED = -2


class FocalSpec(NamedTuple):
    """What a focal loss computes, beside its tensors."""

    classes: int
    alpha: float
    gamma: float
    smoothing: float


def compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _losses(logits: Tensor, weight: float, spec: FocalSpec) -> Tensor:
    """The losses of elements whose right answer is no; the right answer yes has the same with the sign turned."""
    log_right = logsigmoid(-logits)
    cross_entropy = -log_right - (spec.smoothing / 2) * logits
    wrong = logits.sigmoid().square() if spec.gamma == 2 else (spec.gamma * logsigmoid(logits)).exp()
    return weight * wrong * cross_entropy


def _losses_and_slopes(logits: Tensor, weight: float, spec: FocalSpec) -> tuple[Tensor, Tensor]:
    """`_losses` and their derivatives in few passes; not differentiable."""
    wrong = logits.sigmoid()
    cross_entropy = logsigmoid(-logits).add_(logits, alpha=spec.smoothing / 2).neg_()
    slopes = (1 - wrong).mul_(cross_entropy).mul_(spec.gamma).add_(wrong).sub_(spec.smoothing / 2)
    power = wrong.square_() if spec.gamma == 2 else logsigmoid(logits).mul_(spec.gamma).exp_()
    power.mul_(weight)
    return cross_entropy.mul_(power), slopes.mul_(power)


def _split(logits: Tensor, targets: Tensor, spec: FocalSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of real classes (A x classes), targets as a column, which of them name a class, and those classes."""
    rows = logits.reshape(targets.numel(), logits.shape[-1])[:, : spec.classes].to(compute_dtype(logits))
    column = targets.reshape(-1, 1)
    named = (column >= 0) & (column < spec.classes)
    return rows, column, named, column.clamp(0, spec.classes - 1).long()


def forward(logits: Tensor, targets: Tensor, num_positives: Tensor, spec: FocalSpec) -> Tensor:
    """The sum of the losses over the number of positives; differentiable."""
    rows, column, named, classes = _split(logits, targets, spec)
    right = rows.gather(1, classes)
    # First as if no class were right, then what the right ones change.
    change = _losses(-right, spec.alpha, spec) - _losses(right, 1 - spec.alpha, spec)
    counted = torch.where(column != IGNORED, _losses(rows, 1 - spec.alpha, spec), 0.0)
    return (counted.sum() + torch.where(named, change, 0.0).sum()) / num_positives.to(rows.dtype).reshape(())


def loss_and_gradient(logits: Tensor, targets: Tensor, num_positives: Tensor, spec: FocalSpec) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of the sum of the losses in the computation's dtype; not differentiable."""
    rows, column, named, classes = _split(logits, targets, spec)
    right = rows.gather(1, classes)
    losses, slopes = _losses_and_slopes(rows, 1 - spec.alpha, spec)
    losses_right, slopes_right = _losses_and_slopes(-right, spec.alpha, spec)
    losses.scatter_(1, classes, torch.where(named, losses_right, losses.gather(1, classes)))
    slopes.scatter_(1, classes, torch.where(named, slopes_right.neg_(), slopes.gather(1, classes)))
    ignored = column == IGNORED
    losses.masked_fill_(ignored, 0.0)
    slopes.masked_fill_(ignored, 0.0)
    padding = logits.shape[-1] - spec.classes
    gradient = torch.nn.functional.pad(slopes, (0, padding)) if padding else slopes
    return losses.sum() / num_positives.to(rows.dtype).reshape(()), gradient.reshape(logits.shape)


def scaled(gradient: Tensor, grad_loss: Tensor, num_positives: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of the logits from that of the sum."""
    compute = gradient.dtype
    return (gradient * (grad_loss.to(compute).reshape(()) / num_positives.to(compute).reshape(()))).to(dtype)


def backward(grad_loss: Tensor, logits: Tensor, targets: Tensor, num_positives: Tensor, spec: FocalSpec) -> Tensor:
    """The gradient of the logits; not differentiable."""
    gradient = loss_and_gradient(logits, targets, num_positives, spec)[1]
    return scaled(gradient, grad_loss, num_positives, logits.dtype)
