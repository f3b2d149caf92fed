"""Softmax cross-entropy in PyTorch operators: the definition that everything else is held against.

Runs on any device in any floating dtype; half precision is computed in float32, float64 in float64. Differentiable,
so that derivatives of derivatives come out of it too. Logits are rows x classes, labels one integer per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A label that nobody uses: no row is padding.
NO_PADDING = -(1 << 31)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def forward(logits: Tensor, labels: Tensor, smoothing: float, padding_idx: int) -> tuple[Tensor, Tensor]:
    """The loss of each row and the logarithm of its sum of exponentials, both zero for padding.

    A row whose label is no class has no loss: NaN.
    """
    x = logits.to(compute_dtype(logits))
    log_sums = torch.logsumexp(x, 1)
    index, is_class = class_index(labels, x.shape[1])
    own = torch.where(is_class, x.gather(1, index[:, None])[:, 0], torch.nan)
    losses = log_sums - (1.0 - smoothing) * own
    if smoothing:
        losses = losses - smoothing * x.mean(1)
    padding = labels == padding_idx
    return losses.masked_fill(padding, 0.0), log_sums.masked_fill(padding, 0.0)


def backward(
    loss_gradient: Tensor,
    logits: Tensor,
    log_sums: Tensor,
    labels: Tensor,
    smoothing: float,
    padding_idx: int,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient of the logits: softmax minus target, times the gradient of the row's loss; zero for padding.

    `out` receives it where it is given, and may be the logits.
    """
    compute = compute_dtype(logits)
    classes = logits.shape[1]
    softmax = torch.exp(logits.to(compute) - log_sums.to(compute)[:, None])
    is_own = torch.arange(classes, dtype=torch.int64, device=logits.device) == labels[:, None]
    target = (1.0 - smoothing) * is_own.to(compute) + smoothing / classes
    slope = (softmax - target) * loss_gradient.to(compute)[:, None]
    slope = slope.masked_fill((labels == padding_idx)[:, None], 0.0)
    return slope.to(logits.dtype) if out is None else out.copy_(slope)


def class_index(labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Labels that can index a row, and which of them were classes before."""
    index = labels.clamp(0, classes - 1)
    return index, index == labels
