"""Softmax cross-entropy in PyTorch operators: the definition, and the implementation when no kernel runs.

Runs on any device in any floating dtype; half precision is computed in float32, float64 in float64. `forward` is
differentiable twice. Classes are the last dimension of the logits; labels have one integer per row of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._library import compute_dtype

# A label that is never used: no row is padding.
NO_PADDING = -(1 << 31)


def forward(logits: Tensor, labels: Tensor, smoothing: float, padding_idx: int) -> tuple[Tensor, Tensor]:
    """Return the loss of each row and the log of its sum of exponentials, both zero for padding.

    The loss of a row whose label is no class is NaN.
    """
    padding = labels == padding_idx
    x = logits.to(compute_dtype(logits))
    if torch.is_grad_enabled():  # makes the gradient of padding zero for any logits
        x = x.masked_fill(padding[..., None], 0.0)
    if torch.compiler.is_compiling():
        # Inductor computes these four operators in one pass over the logits.
        largest = x.amax(-1, keepdim=True)
        log_sums = largest[..., 0] + (x - largest).exp().sum(-1).log()
    else:
        log_sums = torch.logsumexp(x, -1)
    index = labels.long().clamp(0, x.shape[-1] - 1)
    own = torch.where(index == labels, x.gather(-1, index[..., None])[..., 0], torch.nan)
    losses = log_sums - (1.0 - smoothing) * own
    if smoothing:
        losses = losses - smoothing * x.mean(-1)
    return losses.masked_fill(padding, 0.0), log_sums.masked_fill(padding, 0.0)


def backward(
    dlosses: Tensor, logits: Tensor, log_sums: Tensor, labels: Tensor, smoothing: float, padding_idx: int, *_: Any
) -> Tensor:
    """Return the gradient of the logits: (softmax - target) times the gradient of the row's loss; zero for padding."""
    compute = compute_dtype(logits)
    classes = logits.shape[-1]
    slope = (logits.to(compute) - log_sums.to(compute)[..., None]).exp_()
    if smoothing:
        slope -= smoothing / classes
    index = labels.long().clamp(0, classes - 1)
    own = (index == labels).to(compute) * (smoothing - 1.0)
    if torch.compiler.is_compiling():
        # Inductor fuses a comparison with every class into the pass over the logits, but not a scatter.
        is_own = index[..., None] == torch.arange(classes, dtype=torch.int64, device=logits.device)
        slope = torch.where(is_own, slope + own[..., None], slope)
    else:
        # Not in place: vmap may have many gradients, or labels, for one set of logits.
        slope = slope.scatter_add(-1, index[..., None], own[..., None])
    slope = slope * dlosses.to(compute)[..., None]
    return slope.masked_fill((labels == padding_idx)[..., None], 0.0).to(logits.dtype)
