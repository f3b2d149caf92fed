"""AdamP: Adam whose steps do not lengthen weights that a normalisation makes invariant to their length.

There are two passes. The first updates Adam's moments and measures the sums that the projection needs for every row;
the second updates the parameters. In between the optimizer decides which tensors are projected.
"""

from ..rule import Rule, tl
from .adam import corrections


def _direction(g, m, v, scalars, NESTEROV):
    """Return Adam's direction, without the learning rate and the first correction."""
    if NESTEROV:
        m = m + (g - m) * scalars[1]
    return m / (tl.sqrt(v) * scalars[6] + scalars[4])


def _adamp_measure(values, whole, scalars, FLAGS):
    """Update Adam's moments and measure p * g, g * g, p * p and p * direction. FLAGS: Nesterov."""
    p, g, m, v, a = values
    m = m + (g - m) * scalars[1]
    v = tl.fma(v, scalars[2], scalars[3] * g * g)
    direction = _direction(g, m, v, scalars, FLAGS[0])
    return (p, g, m, v, a), (p * g, g * g, p * p, p * direction)


def _adamp(values, whole, scalars, FLAGS):
    """Update the parameter along Adam's direction, from the moments that `_adamp_measure` has updated.

    FLAGS: Nesterov. `whole`: the multiple of the parameter that the projection subtracts from the direction; the
    multiple of the parameter that weight decay subtracts.
    """
    p, g, m, v, a = values
    direction = _direction(g, m, v, scalars, FLAGS[0]) - whole[0] * p
    return p - whole[1] * p - scalars[0] * direction, g, m, v, a


def _adamp_scalars(*, lr, beta1, beta2, eps, step):
    first, root = corrections(beta1, beta2, step=step)
    return lr * first, 1 - beta1, beta2, 1 - beta2, eps, 0.0, root


ADAMP_MEASURE = Rule(_adamp_measure, (0, 1, 2, 3), (2, 3), _adamp_scalars, helpers=(_direction,), quantities=4)
ADAMP = Rule(_adamp, (0, 2, 3), (0,), _adamp_scalars, helpers=(_direction,))
ADAMP_NESTEROV = Rule(_adamp, (0, 1, 2, 3), (0,), _adamp_scalars, helpers=(_direction,))
