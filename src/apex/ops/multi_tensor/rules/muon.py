"""Muon's two passes around its Newton-Schulz iteration, and Lion.

Slot 3 is the direction: Muon's momentum pass writes it, the iteration makes it orthogonal, and the update reads it.
"""

from ..rule import Rule, tl


def _muon_momentum(values, whole, scalars, FLAGS):
    """Average the gradients in slot 2 and write the direction. FLAGS: Nesterov."""
    p, g, buffer, _direction, b = values
    rest, momentum = scalars[0], scalars[1]
    buffer = buffer + (g - buffer) * rest
    if FLAGS[0]:
        direction = g + (buffer - g) * momentum
    else:
        direction = buffer
    return p, g, buffer, direction, b


def _muon_momentum_scalars(*, momentum):
    return 1 - momentum, momentum


def _muon_update(values, whole, scalars, FLAGS):
    """Take the step. `whole[0]` multiplies the learning rate. FLAGS: decay only where it has the update's sign."""
    p, g, buffer, direction, b = values
    lr, decay = scalars[0], scalars[1]
    update, kept = lr * whole[0] * direction, p
    if FLAGS[0]:
        kept = tl.where(p * direction >= 0, p, 0.0)
    # In one subtraction: the rounding error of p - decay * p alone hardly changes from step to step, and adds up.
    return p - tl.fma(kept, decay, update), g, buffer, direction, b


def _decoupled_scalars(*, lr, weight_decay):
    return lr, lr * weight_decay


MUON_MOMENTUM = Rule(_muon_momentum, reads=(1, 2), writes=(2, 3), scalars=_muon_momentum_scalars)
MUON_UPDATE = Rule(_muon_update, reads=(0, 3), writes=(0,), scalars=_decoupled_scalars)


def _lion(values, whole, scalars, FLAGS):
    """Move by the sign of an average of gradients. FLAGS: decay only where it has the update's sign."""
    p, g, m, a, b = values
    lr, decay, rest1, rest2 = scalars[0], scalars[1], scalars[2], scalars[3]
    average = m + (g - m) * rest1
    # Zeros and NaN stay. Between two numbers `where` would choose PyTorch's default dtype.
    sign = tl.where(average < 0, -1.0, tl.where(average > 0, 1.0, average))
    kept = p
    if FLAGS[0]:
        kept = tl.where(p * sign >= 0, p, 0.0)
    return p - tl.fma(kept, decay, lr * sign), g, m + (g - m) * rest2, a, b


def _lion_scalars(*, lr, weight_decay, beta1, beta2):
    return lr, lr * weight_decay, 1 - beta1, 1 - beta2


LION = Rule(_lion, reads=(0, 1, 2), writes=(0, 2), scalars=_lion_scalars)
