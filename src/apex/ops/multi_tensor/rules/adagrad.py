"""Adagrad."""

from .. import fused
from ..rule import Rule, tl


def _adagrad(values, whole, scalars, FLAGS):
    """Compute Adagrad. FLAGS: decay decoupled from the gradient."""
    p, g, total, a, b = values
    lr, eps, decay, _c, _d, _e, _f, _g = scalars
    if not FLAGS[0]:
        g = g + decay * p
    total = total + g * g
    update = lr * g / (tl.sqrt(total) + eps)
    if FLAGS[0]:
        update = update + decay * p
    return p - update, g, total, a, b


def _adagrad_scalars(*, lr, eps, weight_decay=0.0, decoupled=False):
    return lr, eps, lr * weight_decay if decoupled else weight_decay


ADAGRAD = Rule(_adagrad, reads=(0, 1, 2), writes=(0, 2), scalars=_adagrad_scalars, fused=fused.adagrad)
