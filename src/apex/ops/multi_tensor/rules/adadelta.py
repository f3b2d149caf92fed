"""Adadelta."""

from ..rule import Rule, tl


def _adadelta(values, whole, scalars, FLAGS):
    p, g, square, travelled, a = values
    lr, rho, rest, eps, decay, _b, _c, _d = scalars
    g = g + decay * p
    square = tl.fma(square, rho, rest * g * g)
    delta = tl.sqrt((travelled + eps) / (square + eps)) * g  # one root is quicker than two, and closer
    travelled = tl.fma(travelled, rho, rest * delta * delta)
    return p - lr * delta, g, square, travelled, a


def _adadelta_scalars(*, lr, rho, eps, weight_decay):
    return lr, rho, 1 - rho, eps, weight_decay


ADADELTA = Rule(_adadelta, reads=(0, 1, 2, 3), writes=(0, 2, 3), scalars=_adadelta_scalars)
