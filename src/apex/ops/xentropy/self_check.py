"""A quick numeric check of softmax cross-entropy on one device, for `apex doctor`."""

from __future__ import annotations

import torch

from .._tolerance import excess
from . import reference

ROWS, PADDING = 24, 3


def self_check(device: torch.device) -> float:
    """Largest error, as a multiple of its tolerance, of loss and gradient, of aligned and unaligned rows."""
    from .op import xentropy_backward, xentropy_forward

    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for classes in (1024, 1001):
            logits = torch.randn(ROWS, classes, generator=generator).to(dtype)
            labels = torch.randint(0, classes, (ROWS,), generator=generator)
            labels[::5] = PADDING
            slopes = torch.rand(ROWS, generator=generator)
            found = logits.to(device), labels.to(device)
            losses, log_sums = xentropy_forward(*found, 0.1, PADDING)
            gradient = xentropy_backward(slopes.to(device), found[0], log_sums, found[1], 0.1, PADDING)
            expected, exact_sums = reference.forward(logits.double(), labels, 0.1, PADDING)
            exact = reference.backward(slopes.double(), logits.double(), exact_sums, labels, 0.1, PADDING)
            worst = max(worst, excess(losses.cpu(), expected), excess(gradient.cpu(), exact))
    return worst
