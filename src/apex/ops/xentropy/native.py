"""Softmax cross-entropy on a processor in as few passes as PyTorch's operators allow, many rows at a time.

The exponentials take most of the time, so that the fewest passes are what keeps up with PyTorch's own loss.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .reference import NO_PADDING, class_index, compute_dtype

# Elements of the rows that are worked on together: what temporary results may need. A quarter costs 5% more time.
_ELEMENTS = 1 << 23
# A logarithm of a softmax below which the sum of exponentials cannot be had from it: at -32 float32 leaves an error of
# 2e-6, at -1e9, a masked class, nothing is left of the sum.
_FAR = -32.0


def _parts(rows: int, classes: int) -> Iterator[slice]:
    step = max(1, _ELEMENTS // classes)
    return (slice(begin, begin + step) for begin in range(0, rows, step))


def forward(logits: Tensor, labels: Tensor, smoothing: float, padding_idx: int) -> tuple[Tensor, Tensor]:
    """As `reference.forward`."""
    rows, classes = logits.shape
    if fits_at_once(logits):
        try:
            return _forward_at_once(logits, labels, smoothing, padding_idx)
        except RuntimeError:  # a label that is no class: its row is to be NaN
            pass
    losses, log_sums = (torch.empty(rows, dtype=compute_dtype(logits), device=logits.device) for _ in range(2))
    index, is_class = class_index(labels, classes)
    for part in _parts(rows, classes):
        x, own = logits[part], index[part, None]
        log_softmax = torch.log_softmax(x, 1, dtype=losses.dtype)
        own_log_softmax = log_softmax.gather(1, own)[:, 0]
        # The one subtraction saves a pass over the row; an infinite logit leaves nothing to subtract.
        log_sum = x.gather(1, own)[:, 0] - own_log_softmax
        if not log_sum.isfinite().all():
            log_sum = torch.logsumexp(x.to(losses.dtype), 1)
        log_sums[part] = log_sum
        losses[part] = (smoothing - 1.0) * own_log_softmax
        if smoothing:
            losses[part] -= smoothing * log_softmax.mean(1)
    losses.masked_fill_(~is_class, torch.nan)
    padding = labels == padding_idx
    return losses.masked_fill_(padding, 0.0), log_sums.masked_fill_(padding, 0.0)


def _forward_at_once(logits: Tensor, labels: Tensor, smoothing: float, padding_idx: int) -> tuple[Tensor, Tensor]:
    """The same in few operators, each of which costs ten microseconds or so; raises RuntimeError for a wrong label."""
    losses, own_log_softmax = losses_at_once(logits, labels, smoothing, padding_idx)
    return losses, log_sums_of(logits, labels, own_log_softmax, padding_idx)


def fits_at_once(logits: Tensor) -> bool:
    """Whether all rows can be worked on together."""
    return 0 < logits.numel() <= _ELEMENTS


def losses_at_once(logits: Tensor, labels: Tensor, smoothing: float, padding_idx: int) -> tuple[Tensor, Tensor]:
    """Losses, and for each row the logarithm of the softmax at its label; raises RuntimeError for a wrong label."""
    log_softmax = torch.log_softmax(logits, 1, dtype=compute_dtype(logits))
    padding, index = _padding_and_index(labels, padding_idx, logits.shape[1])
    own_log_softmax = log_softmax.gather(1, index)[:, 0]
    losses = own_log_softmax * (smoothing - 1.0)
    if smoothing:
        losses.sub_(log_softmax.sum(1), alpha=smoothing / logits.shape[1])
    return losses if padding is None else losses.masked_fill_(padding, 0.0), own_log_softmax


def log_sums_of(logits: Tensor, labels: Tensor, own_log_softmax: Tensor, padding_idx: int) -> Tensor:
    """The logarithm of each row's sum of exponentials, zero for padding, from the second result of `losses_at_once`."""
    padding, index = _padding_and_index(labels, padding_idx, logits.shape[1])
    # What was subtracted from a logit saves a pass over its row.
    log_sums = logits.gather(1, index)[:, 0] - own_log_softmax
    if not own_log_softmax.min().item() >= _FAR:  # or NaN
        far = (own_log_softmax >= _FAR).logical_not_().nonzero()[:, 0]
        log_sums[far] = torch.logsumexp(logits[far].to(own_log_softmax.dtype), 1)
    return log_sums if padding is None else log_sums.masked_fill_(padding, 0.0)


def _padding_and_index(labels: Tensor, padding_idx: int, classes: int) -> tuple[Tensor | None, Tensor]:
    """Which rows are padding, None where none can be, and labels that index a row unless they are wrong."""
    padding = None if padding_idx == NO_PADDING else labels == padding_idx
    index = labels if padding is None or 0 <= padding_idx < classes else labels.masked_fill(padding, 0)
    return padding, index[:, None]


def backward(
    loss_gradient: Tensor,
    logits: Tensor,
    log_sums: Tensor,
    labels: Tensor,
    smoothing: float,
    padding_idx: int,
    out: Tensor | None = None,
) -> Tensor:
    """As `reference.backward`."""
    rows, classes = logits.shape
    compute = compute_dtype(logits)
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format) if out is None else out
    index, is_class = class_index(labels, classes)
    padding = labels == padding_idx
    scale = loss_gradient.to(compute).masked_fill(padding, 0.0)
    own = (smoothing - 1.0) * scale * is_class
    shift = log_sums.to(compute)
    # A factor of the exponential is a summand of its argument, which saves a pass.
    is_in_shift = rows > 0 and scale.min().item() >= 0
    if is_in_shift:
        shift = shift - scale.log()
    for part in _parts(rows, classes):
        x, g = logits[part], scale[part, None]
        slope = gradient[part] if gradient.dtype == compute else torch.empty(x.shape, dtype=compute, device=x.device)
        torch.sub(x, shift[part, None], out=slope).exp_()
        if not is_in_shift:
            slope.mul_(g)
        if smoothing:
            slope.sub_(g * (smoothing / classes))
        slope.scatter_add_(1, index[part, None], own[part, None])
        if gradient.dtype != compute:
            gradient[part] = slope
    if padding.any():  # zero even where zero times an infinite logit is not
        gradient[padding] = 0.0
    return gradient
