"""Focal loss in PyTorch operators: the definition, and the implementation when no kernel runs.

Letters: A anchors, C classes; the first `classes` are real and the others padding. A target is the class of its anchor.
A negative target means that all classes are wrong; an anchor with target IGNORED does not count. Runs on any device in
any floating dtype; half precision is computed in float32, float64 in float64.

Let p be the probability that the classifier gives to the wrong answer (whether a class is present). The loss of an
element is weight * p**gamma * cross-entropy. The weight is alpha for the right class and 1 - alpha for the others, and
label smoothing moves the wanted probabilities from 0 and 1 to smoothing/2 and 1 - smoothing/2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .._library import compute_dtype

IGNORED = -2


def forward(
    logits: Tensor, targets: Tensor, num_positives: Tensor, classes: int, alpha: float, gamma: float, smoothing: float
) -> Tensor:
    """Return the differentiable sum of the losses over the number of positives."""
    rows = logits.reshape(targets.numel(), logits.shape[-1])[:, :classes].to(compute_dtype(logits))
    column = targets.reshape(-1, 1)
    right = column == torch.arange(classes, dtype=targets.dtype, device=targets.device)
    # The loss of the right class is the loss of a wrong class with the opposite sign of the logit.
    wrong = torch.where(right, -rows, rows)
    cross_entropy = -logsigmoid(-wrong) - (smoothing / 2) * wrong
    focus = wrong.sigmoid().square() if gamma == 2 else (gamma * logsigmoid(wrong)).exp()
    losses = focus * cross_entropy
    losses = torch.where(right, alpha * losses, (1 - alpha) * losses)
    return torch.where(column != IGNORED, losses, 0.0).sum() / num_positives.to(rows.dtype).reshape(())
