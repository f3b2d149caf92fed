"""A quick numeric check of softmax on one device, for `apex doctor`."""

from __future__ import annotations

import torch

from .._tolerance import excess
from . import reference
from .spec import SoftmaxSpec

SHAPE = (2, 2, 16, 1000)
SCALE = 0.5


def self_check(device: torch.device) -> float:
    """Largest error, as a multiple of its tolerance, with every kind of mask, forward and backward, in three dtypes."""
    from .op import softmax_backward, softmax_forward

    generator = torch.Generator().manual_seed(0)
    hides = torch.rand(2, 1, *SHAPE[2:], generator=generator) < 0.3
    hides[0, 0, 7] = True  # nothing is left of this row
    added = torch.randn(1, *SHAPE[1:], generator=generator)
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, dy = (torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(2))
        for mask, causal in ((None, False), (None, True), (hides, False), (added, False)):
            spec = SoftmaxSpec(SCALE, causal)
            output, _ = softmax_forward(x.to(device), None if mask is None else mask.to(device), spec)
            dx = softmax_backward(dy.to(device), output, spec)
            expected, _ = reference.forward(x.double(), mask, spec)
            expected_dx = reference.backward(dy.double(), output.cpu().double(), spec)
            worst = max(worst, excess(output.cpu(), expected), excess(dx.cpu(), expected_dx))
    return worst
