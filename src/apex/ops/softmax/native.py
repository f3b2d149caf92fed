"""Scaled, masked softmax with PyTorch's operators on a CPU: the definition's steps, in place and without autograd.

Of a causal softmax, a block of queries leaves out the keys that none of them sees.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .._device import SOFTMAX_SUMS_IN_HALF
from .reference import causal_mask, compute_dtype
from .spec import SoftmaxSpec

# Queries of a causal softmax that are taken together: at least so many, and at most so many blocks.
CAUSAL_BLOCK = 64
CAUSAL_BLOCKS = 16


def forward(input: Tensor, mask: Tensor | None, spec: SoftmaxSpec, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `reference.forward`."""
    if spec.causal:
        probabilities = _causal(input, spec.scale)
    else:
        probabilities = _masked(input, mask, spec.scale).to(input.dtype)
    if keep is None:
        return probabilities, probabilities
    return (probabilities * keep.bool()).mul_(spec.kept_scale), probabilities


def plain(input: Tensor, scale: float) -> Tensor:
    """softmax(scale * input), differentiable."""
    if scale == 1.0:
        return torch.softmax(input, -1)
    return torch.softmax(_scaled(input, scale), -1).to(input.dtype)


def _masked(input: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    logits = _scaled(input, scale)
    if mask is None:
        return torch.softmax(logits, -1)
    if mask.is_floating_point():
        logits = logits.float() if logits.dtype.itemsize == 2 else logits
        logits.add_(mask)
    else:
        logits.masked_fill_(mask.bool(), -math.inf)
    return _softmax_or_zero(logits)


def _softmax_or_zero(logits: Tensor) -> Tensor:
    """Softmax of masked logits: rows of which nothing is left are zero."""
    probabilities = torch.softmax(logits, -1)
    if math.isnan(probabilities.select(-1, 0).sum()):
        probabilities.masked_fill_(logits.amax(-1, keepdim=True) == -math.inf, 0.0)
    return probabilities


def _causal(input: Tensor, scale: float) -> Tensor:
    queries, keys = input.shape[-2:]
    step = _causal_step(queries)
    if step == queries <= keys:
        return _softmax_or_zero(_scaled(input, scale).masked_fill_(_future(queries, keys), -math.inf)).to(input.dtype)
    future = _future(step, step)
    output = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    for first in range(0, queries, step):
        last = min(queries, first + step)
        rows = last - first
        end = max(0, last + keys - queries)
        output[..., first:last, end:] = 0
        if end:
            logits = _scaled(input[..., first:last, :end], scale)
            width = min(rows, end)
            logits[..., end - width :].masked_fill_(future[:rows, rows - width : rows], -math.inf)
            output[..., first:last, :end] = _softmax_or_zero(logits)
    return output


@functools.lru_cache(maxsize=8)
def _future(queries: int, keys: int) -> Tensor:
    return causal_mask(queries, keys, torch.device("cpu"))


def _causal_step(queries: int) -> int:
    return min(queries, max(CAUSAL_BLOCK, -(-queries // CAUSAL_BLOCKS)))


def is_exact(dtype: torch.dtype, scale: float) -> bool:
    """Whether the product is no less exact in `dtype` than it is in float32."""
    return dtype.itemsize > 2 or (abs(scale) <= 1.0 and abs(math.frexp(scale)[0]) == 0.5)


def _scaled(input: Tensor, scale: float) -> Tensor:
    """The product in a new tensor, in float32 where half precision would round it."""
    if is_exact(input.dtype, scale):
        return input * scale
    return input.float() * scale if torch.is_grad_enabled() else input.float().mul_(scale)


def backward(dy: Tensor, probabilities: Tensor, spec: SoftmaxSpec, keep: Tensor | None) -> Tensor:
    """As `reference.backward`."""
    if keep is not None:
        dy = (dy.to(compute_dtype(dy)) * keep.bool()).mul_(spec.kept_scale)
    queries, keys = dy.shape[-2:] if spec.causal else (0, 0)
    step = _causal_step(queries)
    if step == queries <= keys:
        return _backward(dy, probabilities, spec.scale)
    dx = torch.empty(dy.shape, dtype=probabilities.dtype, device=dy.device)
    for first in range(0, queries, step):
        last = min(queries, first + step)
        end = max(0, last + keys - queries)
        dx[..., first:last, end:] = 0
        if end:
            seen = (..., slice(first, last), slice(0, end))
            dx[seen] = _backward(dy[seen], probabilities[seen], spec.scale)
    return dx


def _backward(dy: Tensor, probabilities: Tensor, scale: float) -> Tensor:
    compute = compute_dtype(dy) if SOFTMAX_SUMS_IN_HALF else torch.promote_types(dy.dtype, probabilities.dtype)
    dx = torch._softmax_backward_data(dy.to(compute), probabilities.to(compute), -1, compute)
    return (dx if scale == 1.0 else dx.mul_(scale)).to(probabilities.dtype)
