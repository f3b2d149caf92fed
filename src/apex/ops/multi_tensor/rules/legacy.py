"""Rules used only by compiled names and old optimizers: Adam's first form and its inverse, LAMB in two halves, LARC."""

from ..rule import Rule, tl
from . import adam
from .adam import _adam, _adam_scalars, corrections
from .lamb import _direction, _moments


def _adam_unscaling(values, whole, scalars, FLAGS):
    """Compute Adam, and write the gradient back multiplied by `grad_scale`."""
    p, _g, m, v, peak = _adam(values, whole, scalars, FLAGS)
    return p, values[1], m, v, peak


ADAM_UNSCALING = Rule(
    _adam_unscaling, reads=(0, 1, 2, 3), writes=(0, 1, 2, 3), scalars=_adam_scalars, helpers=(adam._moments, _adam)
)


# Adam's first form in Apex: the second moment is not corrected under the root, and eps is beside or under the root. The
# step size includes both corrections, and multiplies the decay too.


def _early_step(m, v, scalars, FLAGS):
    """Return the step without decay. FLAGS: eps under the root."""
    if FLAGS[0]:
        deviation = tl.sqrt(v + scalars[4])
    else:
        deviation = tl.sqrt(v) + scalars[4]
    return scalars[0] * m / deviation


def _early_adam(values, whole, scalars, FLAGS):
    p, g, m, v, a = values
    scaled = g * scalars[6]
    m = m + (scaled - m) * scalars[1]
    v = v * scalars[2] + scalars[3] * scaled * scaled
    return p - (_early_step(m, v, scalars, FLAGS) + scalars[5] * p), g, m, v, a


def _reversible_adam(values, whole, scalars, FLAGS):
    """Compute `_early_adam`, skipping elements whose gradient is not finite, and count these."""
    p, g, m, v, a = values
    finite = tl.abs(g * scalars[6]) < float("inf")
    new_p, _g, new_m, new_v, _a = _early_adam((p, tl.where(finite, g, 0.0), m, v, a), whole, scalars, FLAGS)
    kept = (tl.where(finite, new_p, p), g, tl.where(finite, new_m, m), tl.where(finite, new_v, v), a)
    return kept, (tl.where(finite, 0.0, 1.0), 0.0, 0.0, 0.0)


def _adam_undo(values, whole, scalars, FLAGS):
    """Undo `_reversible_adam`, except for rounding."""
    p, g, m, v, a = values
    finite = tl.abs(g * scalars[6]) < float("inf")
    scaled = tl.where(finite, g, 0.0) * scalars[6]
    old_p = (p + _early_step(m, v, scalars, FLAGS)) / (1.0 - scalars[5])
    old_m = (m - scalars[1] * scaled) / scalars[7]
    old_v = (v - scalars[3] * scaled * scaled) / scalars[2]
    old_v = tl.where(old_v > 0, old_v, 0.0)  # rounding must not leave a negative square
    return tl.where(finite, old_p, p), g, tl.where(finite, old_m, m), tl.where(finite, old_v, v), a


def _early_scalars(*, lr, beta1, beta2, eps, weight_decay, scale, **bias):
    """Return step size, 1 - beta1, beta2, 1 - beta2, eps, decay of a parameter, 1 / loss scale, beta1."""
    first, root = corrections(beta1, beta2, **bias)
    size = lr * first / root
    return size, 1 - beta1, beta2, 1 - beta2, eps, size * weight_decay, 1 / scale, beta1


EARLY_ADAM = Rule(_early_adam, reads=(0, 1, 2, 3), writes=(0, 2, 3), scalars=_early_scalars, helpers=(_early_step,))
REVERSIBLE_ADAM = Rule(
    _reversible_adam,
    reads=(0, 1, 2, 3),
    writes=(0, 2, 3),
    scalars=_early_scalars,
    helpers=(_early_step, _early_adam),
    quantities=1,
)
ADAM_UNDO = Rule(_adam_undo, reads=(0, 1, 2, 3), writes=(0, 2, 3), scalars=_early_scalars, helpers=(_early_step,))


# The halves of LAMB as separate rules, with the step in a list between them.


def _lamb_update(values, whole, scalars, FLAGS):
    """Write the step to slot 4. FLAGS: decay decoupled from the gradient. `whole[0]` is the tensor's decay."""
    p, g, m, v, _update = values
    decay = whole[0] * p
    if not FLAGS[0]:
        g = g + decay
    m, v = _moments(p, g, m, v, scalars, FLAGS)
    update = _direction(p, m, v, scalars, FLAGS)
    if FLAGS[0]:
        update = update + decay
    return p, g, m, v, update


def _lamb_update_scalars(*, beta1, beta2, beta3, eps, **bias):
    """Return the numbers of LAMB, with 0 for the learning rate and for the decay that all tensors share."""
    first, root = corrections(beta1, beta2, **bias)
    return 0.0, first, beta1, beta3, eps, 0.0, root, 1 - beta2


def _lamb_weights(values, whole, scalars, FLAGS):
    """Take the step in slot 1. `whole` is the norms of parameter and step; if one is 0, the step is not rescaled."""
    p, update, a, b, c = values
    ratio = tl.where((whole[0] != 0) & (whole[1] != 0), whole[0] / whole[1], 1.0)
    return p - scalars[0] * ratio * update, update, a, b, c


LAMB_UPDATE = Rule(
    _lamb_update, reads=(0, 1, 2, 3), writes=(2, 3, 4), scalars=_lamb_update_scalars, helpers=(_moments, _direction)
)
LAMB_WEIGHTS = Rule(_lamb_weights, reads=(0, 1), writes=(0,))


def _larc(values, whole, scalars, FLAGS):
    """Add the decay to the gradient and rescale it. FLAGS: never lengthen it.

    `whole` is the squares of parameter and gradient; if one is 0, the gradient is unchanged.
    """
    p, g, a, b, c = values
    lr, trust, eps, decay, _d, _e, _f, _g = scalars
    length = tl.sqrt(whole[0])
    slope = tl.sqrt(whole[1])
    ratio = trust * length / (slope + length * decay + eps)
    if FLAGS[0]:
        ratio = tl.where(ratio > lr, 1.0, ratio / lr)
    both = (length != 0) & (slope != 0)
    return p, tl.where(both, (g + decay * p) * ratio, g), a, b, c


LARC = Rule(
    _larc,
    reads=(0, 1),
    writes=(1,),
    scalars=lambda lr, trust_coefficient, eps, weight_decay: (lr, trust_coefficient, eps, weight_decay),
)
