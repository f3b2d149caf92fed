"""A quick numeric check of the gated linear units on one device, for `apex doctor`."""

from __future__ import annotations

import torch

from .._tolerance import excess
from . import reference

ROWS, COLUMNS = 12, 200


def self_check(device: torch.device) -> float:
    """Largest error, as a multiple of its tolerance, of every activation, forward and backward, in three dtypes."""
    from .op import glu_backward, glu_forward

    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        input, bias, dy = (
            torch.randn(shape, generator=generator).to(dtype)
            for shape in ((ROWS, COLUMNS), (COLUMNS,), (ROWS, COLUMNS // 2))
        )
        for activation in reference.ACTIVATIONS:
            here = input.to(device), bias.to(device), activation
            exact = input.double(), bias.double(), activation
            worst = max(worst, excess(glu_forward(*here).cpu(), reference.forward(*exact)))
            found, wanted = glu_backward(dy.to(device), *here), reference.backward(dy.double(), *exact)
            for actual, expected, terms in zip(found, wanted, (1, ROWS), strict=True):
                assert actual is not None
                assert expected is not None
                worst = max(worst, excess(actual.cpu(), expected, reduction=terms))
    return worst
