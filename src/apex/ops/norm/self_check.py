"""A quick numeric check of the norms on one device, for `apex doctor`."""

from __future__ import annotations

import torch
from torch import Tensor

from .._tolerance import excess
from . import reference
from .spec import NormSpec

ROWS, COLUMNS, EPS = 48, 1000, 1e-5


def self_check(device: torch.device) -> float:
    """Largest error, as a multiple of its tolerance, of both norms, forward and backward, in three dtypes."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, dy = (torch.randn(ROWS, COLUMNS, generator=generator).to(dtype) for _ in range(2))
        weight, bias = (torch.rand(COLUMNS, generator=generator).add(0.5).to(dtype) for _ in range(2))
        for subtract_mean in (True, False):
            worst = max(worst, _largest_error(x, dy, weight, bias if subtract_mean else None, subtract_mean, device))
    return worst


def _largest_error(
    x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor | None, subtract_mean: bool, device: torch.device
) -> float:
    from .dispatch import norm_backward, norm_forward

    spec = NormSpec(COLUMNS, EPS, subtract_mean)
    parameters = weight.to(device), _to(bias, device)
    output, statistics = norm_forward(x.to(device), *parameters, spec, x.dtype)
    gradients = norm_backward(dy.to(device), x.to(device), statistics, *parameters, spec, x.dtype)
    exact = weight.double(), _to(bias, torch.float64)
    expected, statistics = reference.forward(x.double(), *exact, spec, torch.float64)
    expected_gradients = reference.backward(dy.double(), x.double(), statistics, *exact, spec, torch.float64)
    worst = excess(output.cpu(), expected)
    for actual, wanted, reduction in zip(gradients, expected_gradients, (1, ROWS, ROWS), strict=True):
        if actual is not None and wanted is not None:
            worst = max(worst, excess(actual.cpu(), wanted, reduction=reduction))
    return worst


def _to(tensor: Tensor | None, target: torch.device | torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(target)
