"""Softmax cross-entropy in PyTorch operators: the definition, and the implementation when no kernel runs.

Runs on any device in any floating dtype; half precision is computed in float32, float64 in float64. `forward` is
differentiable twice. Classes are the last dimension of the logits; labels have one integer per row of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._library import compute_dtype

# A label that is never used: no row is padding.
NO_PADDING = -(1 << 31)
# Replaces -inf where it is multiplied by a probability of zero.
LOWEST = -1e38


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


def transformed(logits: Tensor, transform: Sequence[float]) -> Tensor:
    """Return cap * tanh(scale * logits / cap) / temperature; `transform` is scale, cap (0: none) and temperature."""
    scale, cap, temperature = transform
    if scale != 1.0:
        logits = logits * scale
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return logits if temperature == 1.0 else logits / temperature


def statistics(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    transform: Sequence[float],
    padding_idx: int,
    names: Sequence[str],
) -> Tensor:
    """Return the named statistics of each row as [names, rows]; zero for padding. Differentiable twice.

    "lse" is the log of the sum of exponentials, "own" the label's logit (NaN if the label is no class), "mean" the sum
    of the logits, "weighted" the sum of the logits times `class_weight`, "entropy" the entropy of the softmax,
    "squares" the sum of its squares, "peak" the greatest logit.
    """
    padding = labels == padding_idx
    x = logits.to(compute_dtype(logits))
    if torch.is_grad_enabled():  # makes the gradient of padding zero for any logits
        x = x.masked_fill(padding[:, None], 0.0)
    z = transformed(x, transform)
    lse = torch.logsumexp(z, -1)
    log_p = (z - lse[:, None]).clamp(min=LOWEST) if {"entropy", "squares"} & set(names) else z
    found = []
    for name in names:
        if name == "lse":
            found.append(lse)
        elif name == "own":
            index = labels.long().clamp(0, z.shape[-1] - 1)
            found.append(torch.where(index == labels, z.gather(-1, index[:, None])[:, 0], torch.nan))
        elif name == "mean":
            found.append(z.sum(-1))
        elif name == "weighted":
            assert class_weight is not None
            found.append((z * class_weight.to(z.dtype)).sum(-1))
        elif name == "entropy":
            found.append(-(log_p.exp() * log_p).sum(-1))
        elif name == "squares":
            found.append((2 * log_p).exp().sum(-1))
        else:
            found.append(z.amax(-1))
    return torch.stack(found).masked_fill(padding, 0.0)


def row_gradient(
    logits: Tensor,
    labels: Tensor,
    log_sums: Tensor,
    coefficients: Tensor,
    class_weight: Tensor | None,
    transform: Sequence[float],
    padding_idx: int,
    names: Sequence[str],
) -> Tensor:
    """Return the gradient of the logits from four coefficients per row, [4, rows].

    With the transformed logits z and p = softmax(z), the first coefficient multiplies p, the second p * z, the third
    `class_weight` (or 1), and the fourth is added for the label. The second is used if `names` has "entropy", the third
    if it has "mean" or "weighted".
    """
    scale, cap, temperature = transform
    compute, classes = compute_dtype(logits), logits.shape[-1]
    x = logits.to(compute)
    z = transformed(x, transform)
    of_softmax, of_product, of_all, of_own = coefficients.to(compute)[:, :, None]
    slope = (z - log_sums.to(compute)[:, None]).exp_()
    slope *= of_softmax + of_product * z.clamp(min=LOWEST) if "entropy" in names else of_softmax
    if "weighted" in names:
        assert class_weight is not None
        slope += of_all * class_weight.to(compute)
    elif "mean" in names:
        slope += of_all
    index = labels.long().clamp(0, classes - 1)[:, None]
    slope.scatter_add_(-1, index, of_own * (index == labels[:, None]))
    if cap:
        slope *= 1.0 - (z * (temperature / cap)).square()
    if scale != temperature:
        slope *= scale / temperature
    return slope.masked_fill_((labels == padding_idx)[:, None], 0.0).to(logits.dtype)
