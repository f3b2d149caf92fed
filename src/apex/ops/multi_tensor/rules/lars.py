"""LARS: momentum SGD, its learning rate per tensor set by the lengths of parameter and gradient."""

from ..rule import Rule, tl


def _lars_norms(values, whole, scalars, FLAGS):
    """Measure the squares of parameter and gradient."""
    p, g = values[0], values[1]
    return values, (p * p, g * g, 0.0, 0.0)


def _lars(values, whole, scalars, FLAGS):
    """Take the step. FLAGS: Nesterov, weight decay after the momentum, `whole` is the measurements of `LARS_NORMS`."""
    p, g, buffer, a, b = values
    lr, momentum, share, decay, trust, eps, _c, _d = scalars
    if FLAGS[2]:
        length = tl.sqrt(whole[0])
        slope = tl.sqrt(whole[1])
        both = (length > 0) & (slope > 0)
        lr = lr * tl.where(both, trust * length / (slope + decay * length + eps), 1.0)
    if not FLAGS[1]:
        g = g + decay * p
    buffer = buffer * momentum - lr * share * g
    if FLAGS[0]:
        update = buffer * momentum - lr * g
    else:
        update = buffer
    if FLAGS[1]:
        update = update - lr * decay * p
    return p + update, g, buffer, a, b


def _lars_scalars(*, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, trust_coefficient=0.001, eps=0.0, first=False):
    """Return the numbers of LARS.

    `first`, a flag or a number on the device: the buffer takes the gradient undampened.
    """
    return lr, momentum, 1 - dampening * (1 - first), weight_decay, trust_coefficient, eps


LARS_NORMS = Rule(_lars_norms, reads=(0, 1), writes=(), quantities=2)
LARS = Rule(_lars, reads=(0, 1, 2), writes=(0, 2), scalars=_lars_scalars)
PLAIN_LARS = Rule(_lars, reads=(0, 1), writes=(0,), scalars=_lars_scalars)
