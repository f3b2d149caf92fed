"""NovoGrad: gradients divided by a moving average of their norm, which is one number per tensor."""

from ..rule import Rule, tl
from .adam import corrections


def _novograd(values, whole, scalars, FLAGS):
    """Take the step. FLAGS: normalise and decay inside the moment, `whole[0]` averages squares (instead of norms)."""
    p, g, m, a, b = values
    step_size, beta1, share, eps, decay, root, _c, _d = scalars
    norm = whole[0]
    if FLAGS[1]:
        norm = tl.sqrt(norm)
    inverse = 1.0 / (norm * root + eps)
    if FLAGS[0]:
        m = tl.fma(m, beta1, share * tl.fma(g, inverse, decay * p))
        p = p - step_size * m
    else:
        m = tl.fma(m, beta1, share * g)
        p = p - tl.fma(decay, p, step_size * inverse * m)
    return p, g, m, a, b


def _novograd_scalars(*, lr, beta1, beta2, eps, weight_decay, grad_averaging=True, inside=False, **bias):
    first, root = corrections(beta1, beta2, **bias)
    decay = weight_decay if inside else lr * weight_decay
    return lr * first, beta1, 1 - beta1 if grad_averaging else 1.0, eps, decay, root


NOVOGRAD = Rule(_novograd, reads=(0, 1, 2), writes=(0, 2), scalars=_novograd_scalars)
