"""Focal loss in PyTorch operators: the definition, and the implementation where there is no kernel.

Letters: A anchors, C classes, of which the first `classes` are real and the others padding. A target is the class of
its anchor; any negative one means that all classes are wrong, except IGNORED: such an anchor does not count. Runs on
any device in any floating dtype; half precision is computed in float32, float64 in float64.

With p the probability that the classifier gives to the wrong answer (of a class being there or not), an element's loss
is weight * p**gamma * cross-entropy, where the weight is alpha for the right class and 1 - alpha for the others, and
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
    """The sum of the losses over the number of positives; differentiable."""
    rows = logits.reshape(targets.numel(), logits.shape[-1])[:, :classes].to(compute_dtype(logits))
    column = targets.reshape(-1, 1)
    right = column == torch.arange(classes, dtype=targets.dtype, device=targets.device)
    # The right class has the loss of a wrong one with the sign of its logit turned.
    wrong = torch.where(right, -rows, rows)
    cross_entropy = -logsigmoid(-wrong) - (smoothing / 2) * wrong
    focus = wrong.sigmoid().square() if gamma == 2 else (gamma * logsigmoid(wrong)).exp()
    losses = focus * cross_entropy
    losses = torch.where(right, alpha * losses, (1 - alpha) * losses)
    return torch.where(column != IGNORED, losses, 0.0).sum() / num_positives.to(rows.dtype).reshape(())
