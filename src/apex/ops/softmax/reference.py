"""Scaled, masked softmax with dropout in PyTorch operators: the definition that everything else is held against.

Runs on any device in any floating dtype; half precision is computed in float32, float64 in float64. Differentiable, so
that derivatives of derivatives come out of it too.

A mask of bool or uint8 hides what it marks; a floating-point mask is added to the scaled input. Rows of which a mask
(or causality) leaves nothing are zero; without a mask a row of -inf is NaN, as it is for `torch.softmax`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .spec import SoftmaxSpec


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """True where a query does not see a key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(keys - queries + 1)


def forward(input: Tensor, mask: Tensor | None, spec: SoftmaxSpec, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and probabilities before dropout, the same tensor where nothing is dropped; `keep` marks what stays."""
    logits = input.to(compute_dtype(input)) * spec.scale
    if spec.causal:
        mask = causal_mask(input.shape[-2], input.shape[-1], input.device)
    if mask is not None:
        if mask.is_floating_point():
            logits = logits + mask
        else:
            logits = logits.masked_fill(mask.bool(), -math.inf)
    probabilities = torch.softmax(logits, -1)
    if mask is not None and input.shape[-1]:
        nothing_left = logits.amax(-1, keepdim=True) == -math.inf
        probabilities = probabilities.masked_fill(nothing_left, 0.0)
    output = probabilities
    if keep is not None:
        output = (output * keep.bool() * spec.kept_scale).to(input.dtype)
        return output, probabilities.to(input.dtype)
    output = output.to(input.dtype)
    return output, output


def backward(dy: Tensor, probabilities: Tensor, spec: SoftmaxSpec, keep: Tensor | None = None) -> Tensor:
    """The gradient of the input, in the dtype of the probabilities."""
    compute = compute_dtype(probabilities)
    gradient, weights = dy.to(compute), probabilities.to(compute)
    if keep is not None:
        gradient = gradient * keep.bool() * spec.kept_scale
    inner = (gradient * weights).sum(-1, keepdim=True)
    return (weights * (gradient - inner) * spec.scale).to(probabilities.dtype)
