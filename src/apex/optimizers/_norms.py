"""Norms over all gradients of an optimizer, and the clipping that follows from them, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.multi_tensor import rules
from ._base import Skip
from ._buckets import Bucket


def global_norm(buckets: Sequence[Bucket], skip: Skip) -> Tensor | None:
    """The norm of all gradients, float32 [1], the loss scale taken out of them; None of no gradients."""
    totals = []
    for bucket in buckets:
        there = skip.on(bucket.device)
        totals.append(
            bucket.lists.measured_total(rules.SQUARE_SUM, {}, noop=there.noop, grad_scale=there.inverse_scale)
        )
    if not totals:
        return None
    return torch.stack([total.to(totals[0].device) for total in totals]).sum(0).sqrt()


def clipped(skip: Skip, norm: Tensor | None, limit: float) -> Skip:
    """`skip` with gradients of this `norm` scaled down to `limit`."""
    if norm is None:
        return skip
    factor = torch.clamp(limit / norm, max=1.0)
    if skip.inverse_scale is not None:
        factor = factor * skip.inverse_scale.to(factor.device)
    return Skip(skip.noop, factor)


def clipped_together(buckets: Sequence[Bucket], skip: Skip, limit: float) -> Skip:
    """`skip` with the gradients of all buckets scaled down to a norm of `limit`."""
    if len(buckets) != 1:
        return clipped(skip, global_norm(buckets, skip), limit)
    (bucket,) = buckets
    there = skip.on(bucket.device)
    _, factor = bucket.lists.measured_clip(
        rules.SQUARE_SUM, limit, 0.0, noop=there.noop, grad_scale=there.inverse_scale
    )
    return Skip(skip.noop, factor)
