"""RMSprop, in PyTorch's form and in TensorFlow's."""

from ..rule import Rule, tl


def _rmsprop(values, whole, scalars, FLAGS):
    """Take the step. FLAGS: centered, momentum, epsilon below the root.

    Slot 2 is the mean square; then come the momentum buffer, if there is momentum, and the mean gradient, if centered.
    """
    p, g, square, third, fourth = values
    lr, inner_lr, alpha, rest, eps, decay, shrink, momentum = scalars
    p = p - shrink * p
    g = g + decay * p
    square = tl.fma(square, alpha, rest * g * g)
    spread = square
    if FLAGS[0]:
        if FLAGS[1]:
            fourth = fourth + (g - fourth) * rest
            spread = square - fourth * fourth
        else:
            third = third + (g - third) * rest
            spread = square - third * third
        # Rounding can push the variance of steady gradients a little below zero, where the root is NaN.
        spread = tl.abs(spread)
    if FLAGS[2]:
        deviation = tl.sqrt(spread + eps)
    else:
        deviation = tl.sqrt(spread) + eps
    update = inner_lr * g / deviation
    if FLAGS[1]:
        third = third * momentum + update
        update = third
    return p - lr * update, g, square, third, fourth


def _rmsprop_scalars(*, lr, alpha, eps, weight_decay=0.0, momentum=0.0, decoupled=False, lr_in_momentum=False):
    """Return the numbers of RMSprop. With `lr_in_momentum` the buffer accumulates updates times the learning rate."""
    outer, inner = (1.0, lr) if lr_in_momentum else (lr, 1.0)
    decay, shrink = (0.0, lr * weight_decay) if decoupled else (weight_decay, 0.0)
    return outer, inner, alpha, 1 - alpha, eps, decay, shrink, momentum


RMSPROP = Rule(_rmsprop, reads=(0, 1, 2), writes=(0, 2), scalars=_rmsprop_scalars)
# The first: centered or with momentum. The second: centered and with momentum.
RMSPROP_MORE = Rule(_rmsprop, (0, 1, 2, 3), (0, 2, 3), _rmsprop_scalars)
RMSPROP_ALL = Rule(_rmsprop, (0, 1, 2, 3, 4), (0, 2, 3, 4), _rmsprop_scalars)
