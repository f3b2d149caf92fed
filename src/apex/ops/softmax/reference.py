"""Scaled, masked softmax with dropout in PyTorch operators: the definition for tests of other implementations.

Runs on any device in any floating dtype; half precision is computed in float32, float64 in float64. Differentiable
twice.

A mask of bool or uint8 hides elements where it is nonzero; a floating-point mask is added to the scaled input. Rows
that a mask (or causality) hides completely are zero; without a mask a row of -inf is NaN, as it is for `torch.softmax`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._library import compute_dtype


class SoftmaxSpec(NamedTuple):
    """Settings of softmax(`scale` * input) over the last dimension, then dropout with probability `dropout`.

    `causal`: query i sees key j if j <= i + keys - queries, so that the last query sees every key.
    """

    scale: float = 1.0
    causal: bool = False
    dropout: float = 0.0


def kept_scale(dropout: float) -> float:
    """Return the factor of the elements that dropout keeps."""
    return 1.0 / (1.0 - dropout) if dropout < 1.0 else 0.0


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return True for each key that a query does not see."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(keys - queries + 1)


def forward(
    input: Tensor, mask: Tensor | None, keep: Tensor | None, scale: float, causal: bool, dropout: float
) -> tuple[Tensor, Tensor | None]:
    """Return the output and, if `keep` marks the kept elements, the probabilities before dropout."""
    logits = input.to(compute_dtype(input)) * scale
    if causal:
        mask = causal_mask(input.shape[-2], input.shape[-1], input.device)
    if mask is not None:
        if mask.is_floating_point():
            logits = logits + mask
        else:
            logits = logits.masked_fill(mask.bool(), -math.inf)
    # Compared with 0: for a size alone PyTorch 2.6 would compile a graph for each value.
    if mask is not None and input.shape[-1] != 0:
        nothing_left = logits.amax(-1, keepdim=True) == -math.inf
        if torch.is_grad_enabled():  # makes derivatives zero too
            logits = logits.masked_fill(nothing_left, 0.0)
        probabilities = torch.softmax(logits, -1).masked_fill(nothing_left, 0.0)
    else:
        probabilities = torch.softmax(logits, -1)
    if keep is None:
        return probabilities.to(input.dtype), None
    kept = probabilities * keep.bool() * kept_scale(dropout)
    return kept.to(input.dtype), probabilities.to(input.dtype)


def backward(
    dy: Tensor, probabilities: Tensor, keep: Tensor | None, scale: float, causal: bool, dropout: float, *_: Any
) -> Tensor:
    """Return the gradient of the input, in the dtype of the probabilities."""
    compute = compute_dtype(probabilities)
    gradient, weights = dy.to(compute), probabilities.to(compute)
    if keep is not None:
        gradient = gradient * keep.bool() * kept_scale(dropout)
    slope = torch._softmax_backward_data(gradient, weights, -1, compute)
    return (slope * scale).to(probabilities.dtype)
