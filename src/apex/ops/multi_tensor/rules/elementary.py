"""Passes over lists of tensors that are not optimizers: scaling, sums, norms."""

from ..rule import Rule, tl


def _scale(values, whole, scalars, FLAGS):
    _out, x, a, b, c = values
    return x * scalars[0], x, a, b, c


def _scale_each(values, whole, scalars, FLAGS):
    """Scale by each tensor's own factor."""
    _out, x, a, b, c = values
    return x * whole[0], x, a, b, c


def _axpby(values, whole, scalars, FLAGS):
    _out, x, y, a, b = values
    return scalars[0] * x + scalars[1] * y, x, y, a, b


def _mask(values, whole, scalars, FLAGS):
    """Set elements whose mask is 0 to zero, also NaN."""
    x, a, mask, b, c = values
    return tl.where(mask > 0.0, x, 0.0), a, mask, b, c


def _square_sum(values, whole, scalars, FLAGS):
    _out, x, a, b, c = values
    x = x * scalars[0]
    return (x, x, a, b, c), (x * x, 0.0, 0.0, 0.0)


def _scale_after_square_sum(values, whole, scalars, FLAGS):
    _out, x, a, b, c = values
    return (x * scalars[0], x, a, b, c), (x * x, 0.0, 0.0, 0.0)


def _absolute_maximum(values, whole, scalars, FLAGS):
    return values, (tl.abs(values[1]), 0.0, 0.0, 0.0)


def _factor(factor=1.0):
    return (factor,)


SCALE = Rule(_scale, reads=(1,), writes=(0,))
SCALE_EACH = Rule(_scale_each, reads=(1,), writes=(0,))
AXPBY = Rule(_axpby, reads=(1, 2), writes=(0,))
MASK = Rule(_mask, reads=(0, 2), writes=(0,))
SQUARE_SUM = Rule(_square_sum, reads=(1,), writes=(), scalars=_factor, quantities=1)
SCALE_SQUARE_SUM = Rule(_square_sum, reads=(1,), writes=(0,), scalars=_factor, quantities=1)
SCALE_AFTER_SQUARE_SUM = Rule(_scale_after_square_sum, reads=(1,), writes=(0,), scalars=_factor, quantities=1)
MAXIMUM = Rule(_absolute_maximum, reads=(1,), writes=(), quantities=1, maximum=True)
