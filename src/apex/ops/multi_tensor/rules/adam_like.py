"""Rules with Adam's moments and another update: AdEMAMix, NAdam, RAdam and Schedule-Free AdamW."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..._graph_numbers import lifted
from ..rule import Rule, tl
from .adam import corrections


def _ademamix(values, whole, scalars, FLAGS):
    """Compute AdEMAMix; slots 2 to 4 are the fast average, the slow one and the squares. FLAGS: cautious decay."""
    p, g, fast, slow, v = values
    fast_size, slow_size, rest1, rest2, rest3, eps, decay, root = scalars
    fast = fast + (g - fast) * rest1
    slow = slow + (g - slow) * rest3
    v = v + (g * g - v) * rest2
    update = tl.fma(fast_size, fast, slow_size * slow) / (tl.sqrt(v) * root + eps)
    shrink = decay * p
    if FLAGS[0]:
        shrink = tl.where(update * p >= 0, shrink, 0.0)
    return p - (update + shrink), g, fast, slow, v


def _share(step: Any, over: Any) -> Any:
    """Return the completed share of a warm-up of `over` steps, from 0 to 1."""
    if not over:
        return 1.0
    if isinstance(step, Tensor):
        return torch.clamp(step / over, max=1.0)
    return lifted(lambda count, steps: min(count / steps, 1.0), step, over)


def _slow_beta(beta1: Any, beta3: Any, share: Any) -> Any:
    """Return beta3 during its warm-up from beta1: the half-life, less one step, grows linearly."""
    start, end = (lifted(lambda beta: math.log(0.5) / math.log(beta) - 1, decay) for decay in (beta1, beta3))
    return 0.5 ** (1 / (start * (1 - share) + end * share + 1))


def _ademamix_scalars(*, lr, betas, alpha, eps, weight_decay, step, alpha_warmup=None, beta3_warmup=None):
    beta1, beta2, beta3 = betas
    first, root = corrections(beta1, beta2, step)
    if beta3_warmup:
        beta3 = _slow_beta(beta1, beta3, _share(step, beta3_warmup))
    slow_size = lr * alpha * _share(step, alpha_warmup)
    return lr * first, slow_size, 1 - beta1, 1 - beta2, 1 - beta3, eps, lr * weight_decay, root


ADEMAMIX = Rule(_ademamix, reads=(0, 1, 2, 3, 4), writes=(0, 2, 3, 4), scalars=_ademamix_scalars)


def _radam(values, whole, scalars, FLAGS):
    """Compute RAdam. FLAGS: decay decoupled from the gradient; decay only where it has the update's sign."""
    p, g, m, v, b = values
    adaptive_size, plain_size, rest1, beta2, rest2, eps, decay, _unused = scalars
    if not FLAGS[0]:
        g = g + decay * p
    m = m + (g - m) * rest1
    v = tl.fma(v, beta2, rest2 * g * g)
    update = m * (adaptive_size / (tl.sqrt(v) + eps) + plain_size)
    if FLAGS[0]:
        shrink = decay * p
        if FLAGS[1]:
            shrink = tl.where(update * p >= 0, shrink, 0.0)
        update = update + shrink
    return p - update, g, m, v, b


def _radam_scalars(*, lr, beta1, beta2, eps, weight_decay, step, decoupled=False):
    """Return the step sizes with the rectified deviation and without it; one of them is 0."""
    first, most = lr / (1 - beta1**step), 2 / (1 - beta2) - 1
    power = beta2**step
    length = most - 2 * step * power / (1 - power)  # effective length of the second moment's average
    adaptive: Any = 0.0
    plain: Any = first
    if isinstance(length, Tensor) or length > 5:
        variance = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)
        adaptive, plain = first * (variance * (1 - power)) ** 0.5, 0.0
    if isinstance(length, Tensor):
        adaptive, plain = torch.where(length > 5, adaptive, 0.0), torch.where(length > 5, 0.0, first)
    decay = lr * weight_decay if decoupled else weight_decay
    return adaptive, plain, 1 - beta1, beta2, 1 - beta2, eps, decay


RADAM = Rule(_radam, reads=(0, 1, 2, 3), writes=(0, 2, 3), scalars=_radam_scalars)


def _nadam(values, whole, scalars, FLAGS):
    """Compute NAdam. FLAGS: decay decoupled from the gradient; decay only where it has the update's sign."""
    p, g, m, v, b = values
    gradient_size, moment_size, rest1, beta2, rest2, eps, decay, root = scalars
    if not FLAGS[0]:
        g = g + decay * p
    m = m + (g - m) * rest1
    v = tl.fma(v, beta2, rest2 * g * g)
    update = tl.fma(gradient_size, g, moment_size * m) / (tl.sqrt(v) * root + eps)
    if FLAGS[0]:
        shrink = decay * p
        if FLAGS[1]:
            shrink = tl.where(update * p >= 0, shrink, 0.0)
        update = update + shrink
    return p - update, g, m, v, b


def _nadam_scalars(*, lr, beta1, beta2, eps, weight_decay, step, momentum, next_momentum, product, decoupled=False):
    """Return NAdam's numbers; `product` multiplies all momentum factors up to this step."""
    _, root = corrections(beta1, beta2, step)
    sizes = lr * (1 - momentum) / (1 - product), lr * next_momentum / (1 - product * next_momentum)
    return *sizes, 1 - beta1, beta2, 1 - beta2, eps, lr * weight_decay if decoupled else weight_decay, root


NADAM = Rule(_nadam, reads=(0, 1, 2, 3), writes=(0, 2, 3), scalars=_nadam_scalars)


def _schedule_free(values, whole, scalars, FLAGS):
    """Compute Schedule-Free AdamW: slot 0 is y, where gradients are taken, slot 2 is z. FLAGS: cautious decay."""
    y, g, z, v, b = values
    lr, share, pull, beta2, rest2, eps, decay, root = scalars
    v = tl.fma(v, beta2, rest2 * g * g)
    update = g / (tl.sqrt(v) * root + eps)
    shrink = decay * y
    if FLAGS[0]:
        shrink = tl.where(update * y >= 0, shrink, 0.0)
    update = update + shrink
    y = y + (z - y) * share
    return tl.fma(pull, update, y), g, z - lr * update, v, b


def _schedule_free_scalars(*, lr, beta1, beta2, eps, weight_decay, step, share):
    """Return Schedule-Free AdamW's numbers; `share` is this step's weight in the average of z."""
    _, root = corrections(beta1, beta2, step)
    return lr, share, lr * (beta1 * (1 - share) - 1), beta2, 1 - beta2, eps, weight_decay, root


SCHEDULE_FREE = Rule(_schedule_free, reads=(0, 1, 2, 3), writes=(0, 2, 3), scalars=_schedule_free_scalars)
