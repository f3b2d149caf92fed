"""LAMB: Adam's step, its length per tensor set by the lengths of the parameter and of the step.

There are two passes: `LAMB_MOMENTS` updates the moments and measures, and `LAMB_STEP` computes the step once more from
the moments, which moves less memory than storing it. `LAMB_UNSCALED` is both in one pass, with the length unchanged.
"""

from ..rule import Rule, tl
from .adam import corrections


def _direction(p, m, v, scalars, FLAGS):
    """Return the direction of the step. FLAGS: decoupled decay; decay only where it has the direction's sign."""
    update = scalars[1] * m / (tl.sqrt(v) * scalars[6] + scalars[4])
    if FLAGS[0]:
        shrink = scalars[5] * p
        if FLAGS[1]:
            shrink = tl.where(update * p >= 0, shrink, 0.0)
        update = update + shrink
    return update


def _moments(p, g, m, v, scalars, FLAGS):
    if not FLAGS[0]:
        g = g + scalars[5] * p
    m = tl.fma(m, scalars[2], scalars[3] * g)
    v = v + (g * g - v) * scalars[7]
    return m, v


def _lamb_moments(values, whole, scalars, FLAGS):
    """Update the moments; measure the squares of parameter and step. FLAGS: as of `_direction`."""
    p, g, m, v, a = values
    m, v = _moments(p, g, m, v, scalars, FLAGS)
    update = _direction(p, m, v, scalars, FLAGS)
    return (p, g, m, v, a), (p * p, update * update, 0.0, 0.0)


def _lamb_step(values, whole, scalars, FLAGS):
    """Take the step; `whole` is the measurements of `LAMB_MOMENTS`."""
    p, g, m, v, a = values
    both = (whole[0] > 0) & (whole[1] > 0)
    ratio = tl.where(both, tl.sqrt(whole[0]) / tl.sqrt(whole[1]), 1.0)
    update = _direction(p, m, v, scalars, FLAGS)
    return p - scalars[0] * ratio * update, g, m, v, a


def _lamb_unscaled(values, whole, scalars, FLAGS):
    p, g, m, v, a = values
    m, v = _moments(p, g, m, v, scalars, FLAGS)
    return p - scalars[0] * _direction(p, m, v, scalars, FLAGS), g, m, v, a


def _lamb_scalars(*, lr, beta1, beta2, eps, weight_decay, step, bias_correction=True, grad_averaging=True):
    """Return lr, correction of m, beta1, share of the gradient in m, eps, decay, correction of v's root, 1 - beta2."""
    first, root = corrections(beta1, beta2, step, bias_correction)
    return lr, first, beta1, 1 - beta1 if grad_averaging else 1.0, eps, weight_decay, root, 1 - beta2


LAMB_MOMENTS = Rule(
    _lamb_moments,
    reads=(0, 1, 2, 3),
    writes=(2, 3),
    scalars=_lamb_scalars,
    helpers=(_moments, _direction),
    quantities=2,
)
LAMB_STEP = Rule(_lamb_step, reads=(0, 2, 3), writes=(0,), scalars=_lamb_scalars, helpers=(_direction,))
LAMB_UNSCALED = Rule(
    _lamb_unscaled, reads=(0, 1, 2, 3), writes=(0, 2, 3), scalars=_lamb_scalars, helpers=(_moments, _direction)
)
