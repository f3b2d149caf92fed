"""Stochastic gradient descent, with or without momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import fused
from ..rule import Rule, tl


def _sgd(values, whole, scalars, FLAGS):
    """Take the step. FLAGS: Nesterov, weight decay after the momentum, momentum in float16."""
    p, g, buffer, a, b = values
    lr, keep, rest, decay, momentum, _c, _d, _e = scalars
    if not FLAGS[1]:
        g = g + decay * p
    buffer = tl.fma(buffer, keep, rest * g)
    if FLAGS[2]:
        # The step uses the stored value. Otherwise a parameter and a step that are equal in float16 do not cancel.
        buffer = buffer.to(tl.float16).to(tl.float32)
    if FLAGS[0]:
        update = g + momentum * buffer
    else:
        update = buffer
    if FLAGS[1]:
        update = update + decay * p
    return p - lr * update, g, buffer, a, b


def _plain_sgd(values, whole, scalars, FLAGS):
    p, g, a, b, c = values
    return p - scalars[0] * (g + scalars[3] * p), g, a, b, c


def sgd_flags(nesterov: Any, wd_after_momentum: Any, buffers: Sequence[Tensor]) -> tuple[bool, ...]:
    """Return the flags of `SGD`, for momentum buffers of one dtype."""
    return bool(nesterov), bool(wd_after_momentum), bool(buffers) and buffers[0].dtype == torch.float16


def _sgd_scalars(*, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, first=False):
    """Return the numbers of SGD. `first`, a flag or a number on the device: the buffer becomes the plain gradient."""
    return lr, momentum * (1 - first), 1 - dampening * (1 - first), weight_decay, momentum


SGD = Rule(_sgd, reads=(0, 1, 2), writes=(0, 2), scalars=_sgd_scalars, fused=fused.sgd)
PLAIN_SGD = Rule(_plain_sgd, reads=(0, 1), writes=(0,), scalars=_sgd_scalars, fused=fused.sgd)
