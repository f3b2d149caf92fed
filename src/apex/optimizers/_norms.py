"""Norms over all gradients of an optimizer, and the clipping that follows from them, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.multi_tensor import rules
from ._base import LossScaling
from ._buckets import Bucket


def global_norm(buckets: Sequence[Bucket], scaling: LossScaling) -> Tensor | None:
    """The norm of all gradients, float32 [1], the loss scale taken out of them; None of no gradients."""
    totals = []
    for bucket in buckets:
        there = scaling.on(bucket.device)
        totals.append(bucket.lists.measured_total(rules.SQUARE_SUM, {}, **there.arguments))
    if not totals:
        return None
    return torch.stack([total.to(totals[0].device) for total in totals]).sum(0).sqrt()


def clipped(scaling: LossScaling, norm: Tensor | None, limit: float) -> LossScaling:
    """`scaling` with gradients of this `norm` scaled down to `limit`."""
    if norm is None:
        return scaling
    factor = torch.clamp(limit / norm, max=1.0)
    if scaling.inverse_scale is not None:
        factor = factor * scaling.inverse_scale.to(factor.device)
    return LossScaling(scaling.found_inf, factor)


def clipped_together(buckets: Sequence[Bucket], scaling: LossScaling, limit: float) -> LossScaling:
    """`scaling` with the gradients of all buckets scaled down to a norm of `limit`."""
    if len(buckets) != 1:
        return clipped(scaling, global_norm(buckets, scaling), limit)
    (bucket,) = buckets
    there = scaling.on(bucket.device)
    _, factor = bucket.lists.measured_clip(rules.SQUARE_SUM, limit, 0.0, **there.arguments)
    return LossScaling(scaling.found_inf, factor)
