"""A quick numeric check of the attentions on one device, for `apex doctor`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._tolerance import TOLERANCES
from . import reference

HEADS, LENGTH, HEAD = 2, 40, 24
BOUNDS = (0, 33, 40, 80)


def self_check(device: torch.device) -> float:
    """Largest error, as a multiple of its tolerance, forward and backward, in three dtypes."""
    return max(
        check(device, dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for check in (_biased_error, _packed_error)
    )


def _biased_error(device: torch.device, dtype: torch.dtype) -> float:
    from .biased import attention

    generator = torch.Generator().manual_seed(0)
    shapes = [(3, HEADS, LENGTH, HEAD)] * 3 + [(1, HEADS, LENGTH, LENGTH)]
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    mask = (torch.rand(3, 1, 1, LENGTH, generator=generator) > 0.3).to(dtype)
    dout = torch.randn(shapes[0], generator=generator).to(dtype)
    inputs = [value.to(device).requires_grad_() for value in values]
    exact = [value.double().requires_grad_() for value in values]
    query, key, value, bias = inputs
    output = attention(query, key, value, mask.to(device), bias)
    query, key, value, bias = exact
    expected = reference.attention(query, key, value, mask.double(), bias)
    gradients = torch.autograd.grad(output, inputs, dout.to(device))
    wanted = torch.autograd.grad(expected, exact, dout.double())
    return _largest_error(dtype, (output, *gradients), (expected, *wanted))


def _packed_error(device: torch.device, dtype: torch.dtype) -> float:
    from .packed import packed_attention

    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(BOUNDS[-1], 3, HEADS, HEAD, generator=generator).to(dtype)
    dout = torch.randn(BOUNDS[-1], HEADS, HEAD, generator=generator).to(dtype)
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    here = qkv.to(device).requires_grad_()
    exact = qkv.double().requires_grad_()
    output = packed_attention(here, bounds.to(device), LENGTH)
    expected = reference.packed_attention(exact, bounds)
    gradients = torch.autograd.grad(output, here, dout.to(device))
    wanted = torch.autograd.grad(expected, exact, dout.double())
    return _largest_error(dtype, (output, *gradients), (expected, *wanted))


def _largest_error(dtype: torch.dtype, actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Of the largest element: probabilities are rounded to the inputs' dtype before values are multiplied by them."""
    allowed = max(TOLERANCES[dtype])
    worst = 0.0
    for mine, exact in zip(actual, expected, strict=True):
        error = (mine.detach().cpu().double() - exact.detach()).abs().max() / exact.detach().abs().max()
        worst = max(worst, math.inf if bool(error.isnan()) else float(error) / allowed)
    return worst
