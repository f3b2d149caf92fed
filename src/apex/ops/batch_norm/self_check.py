"""A quick numeric check of batch norm on one device, for `apex doctor`."""

from __future__ import annotations

import torch
from torch import Tensor

from .._tolerance import excess
from . import reference
from .spec import BatchNormSpec

SHAPE = (3, 72, 9, 7)


def self_check(device: torch.device) -> float:
    """Largest error, as a multiple of its tolerance, forward and backward, in three dtypes and both layouts."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for memory_format in (torch.channels_last, torch.contiguous_format):
            x, z, dy = (
                torch.randn(SHAPE, generator=generator).to(dtype).to(memory_format=memory_format) for _ in range(3)
            )
            weight, bias = (torch.rand(SHAPE[1], generator=generator) + 0.5 for _ in range(2))
            for addend in (z, None):
                worst = max(worst, _largest_error(x, addend, dy, weight, bias, device))
    return worst


def _largest_error(
    x: Tensor, z: Tensor | None, dy: Tensor, weight: Tensor, bias: Tensor, device: torch.device
) -> float:
    from . import stages

    spec = BatchNormSpec(relu=True)
    there = [None if each is None else each.to(device) for each in (x, z, dy, weight, bias)]
    x_there, z_there, dy_there, weight_there, bias_there = there
    assert x_there is not None  # every tensor but z is there
    assert dy_there is not None
    mean, variance = stages.local_statistics(x_there, spec)
    output = stages.normalise(x_there, z_there, mean, variance, weight_there, bias_there, spec)
    gradients = stages.gradients(
        dy_there,
        x_there,
        None if z is None else output,
        mean,
        variance,
        weight_there,
        bias_there,
        spec,
        z is not None,
    )
    wide_x, wide_z, wide_dy = (None if each is None else each.double() for each in (x, z, dy))
    assert wide_x is not None
    assert wide_dy is not None
    exact = reference.statistics(wide_x, spec)
    expected = reference.apply(wide_x, wide_z, *exact, weight.double(), bias.double(), spec)
    dz, plain, along = reference.sums(wide_dy, wide_x, output.cpu(), *exact, spec)
    count = x.numel() // SHAPE[1]
    dx = reference.input_gradient(dz, wide_x, *exact, weight.double(), plain, along, 1 / count, spec)
    worst = excess(output.cpu(), expected)
    wanted = (dx, dz, along, plain)
    for actual, right, terms in zip(gradients, wanted, (1, 1, count, count), strict=True):
        if actual is not None:
            worst = max(worst, excess(actual.cpu(), right, reduction=terms))
    return worst
