"""A quick numeric check of the focal loss on one device, for `apex doctor`."""

from __future__ import annotations

import torch

from .._tolerance import excess
from . import reference

ANCHORS, CLASSES, REAL = 30, 24, 20


def self_check(device: torch.device) -> float:
    """Largest error, as a multiple of its tolerance, of loss and gradient, with and without smoothing, per dtype."""
    from .op import focal_loss_backward, focal_loss_forward

    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(-2, REAL, (ANCHORS,), generator=generator)
    positives, grad_loss = torch.tensor([5.0]), torch.tensor(2.0)
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = (3 * torch.randn(ANCHORS, CLASSES, generator=generator)).to(dtype)
        for gamma, smoothing in ((2.0, 0.0), (1.5, 0.1)):
            spec = reference.FocalSpec(REAL, 0.25, gamma, smoothing)
            here = logits.to(device), targets.to(device), positives.to(device), spec
            exact = logits.double(), targets, positives.double(), spec
            loss, gradient = focal_loss_forward(*here), focal_loss_backward(grad_loss.to(device), *here)
            worst = max(worst, excess(loss.cpu(), reference.forward(*exact), reduction=ANCHORS * REAL))
            worst = max(worst, excess(gradient.cpu(), reference.backward(grad_loss.double(), *exact)))
    return worst
