"""Scaled, masked softmax with dropout in PyTorch operators: the definition that everything else is held against.

Runs on any device in any floating dtype; half precision is computed in float32, float64 in float64. Differentiable, so
that derivatives of derivatives come out of it too.

A mask of bool or uint8 hides what it marks; a floating-point mask is added to the scaled input. Rows of which a mask
(or causality) leaves nothing are zero; without a mask a row of -inf is NaN, as it is for `torch.softmax`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._library import compute_dtype


class SoftmaxSpec(NamedTuple):
    """softmax(`scale` * input) over the last dimension, then dropout with probability `dropout`.

    `causal`: query i sees key j where j <= i + keys - queries, so that the last query sees every key.
    """

    scale: float = 1.0
    causal: bool = False
    dropout: float = 0.0


def kept_scale(dropout: float) -> float:
    """What dropout multiplies the kept elements by."""
    return 1.0 / (1.0 - dropout) if dropout < 1.0 else 0.0


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """True where a query does not see a key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(keys - queries + 1)


def forward(
    input: Tensor, mask: Tensor | None, keep: Tensor | None, scale: float, causal: bool, dropout: float
) -> tuple[Tensor, Tensor | None]:
    """Output and, where `keep` marks what stays of them, the probabilities before dropout."""
    logits = input.to(compute_dtype(input)) * scale
    if causal:
        mask = causal_mask(input.shape[-2], input.shape[-1], input.device)
    if mask is not None:
        if mask.is_floating_point():
            logits = logits + mask
        else:
            logits = logits.masked_fill(mask.bool(), -math.inf)
    # Compared with 0: of a size alone PyTorch 2.6 would compile each value by itself.
    if mask is not None and input.shape[-1] != 0:
        nothing_left = logits.amax(-1, keepdim=True) == -math.inf
        if torch.is_grad_enabled():  # so that derivatives are zero too
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
