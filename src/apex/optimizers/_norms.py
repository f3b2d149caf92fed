"""Norms over all gradients of an optimizer, and gradient clipping by them, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.multi_tensor import rules
from ._base import LossScaling
from ._buckets import UpdateBucket


def global_norm(buckets: Sequence[UpdateBucket], scaling: LossScaling) -> Tensor | None:
    """Return the norm of all unscaled gradients, float32 [1], or None if there are no gradients."""
    totals = []
    for bucket in buckets:
        bucket_scaling = scaling.on(bucket.device)
        total = bucket.lists.measured_total(rules.SQUARE_SUM, {}, **bucket_scaling.arguments)
        totals.append(bucket.over_shards(total))
    if not totals:
        return None
    return torch.stack([total.to(totals[0].device) for total in totals]).sum(0).sqrt()


def clipped(scaling: LossScaling, norm: Tensor | None, limit: float) -> LossScaling:
    """Return `scaling` extended to scale gradients of the given `norm` down to `limit`."""
    if norm is None:
        return scaling
    factor = torch.clamp(limit / norm, max=1.0)
    if scaling.inverse_scale is not None:
        factor = factor * scaling.inverse_scale.to(factor.device)
    return LossScaling(scaling.found_inf, factor)


def clipped_together(buckets: Sequence[UpdateBucket], scaling: LossScaling, limit: float) -> LossScaling:
    """Return `scaling` extended to scale the gradients of all buckets down to a joint norm of `limit`."""
    if len(buckets) != 1 or buckets[0].shard_groups:
        return clipped(scaling, global_norm(buckets, scaling), limit)
    (bucket,) = buckets
    bucket_scaling = scaling.on(bucket.device)
    _, factor = bucket.lists.measured_clip(rules.SQUARE_SUM, limit, 0.0, **bucket_scaling.arguments)
    return LossScaling(scaling.found_inf, factor)
