"""Adam and AdamW, with or without AMSGrad or an average of the parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .. import fused
from ..rule import Rule, tl


def _moments(p, g, m, v, scalars, FLAGS):
    """Return both moments, updated with the gradient; unless decay is decoupled (FLAGS[0]), it is added to it."""
    rest1, beta2, rest2, decay = scalars[1], scalars[2], scalars[3], scalars[5]
    if not FLAGS[0]:
        g = g + decay * p
    return m + (g - m) * rest1, tl.fma(v, beta2, rest2 * g * g)


def _adam(values, whole, scalars, FLAGS):
    """Compute Adam. FLAGS: decay decoupled from the gradient, AMSGrad."""
    p, g, m, v, peak = values
    step_size, _rest1, _beta2, _rest2, eps, decay, root, _unused = scalars
    m, v = _moments(p, g, m, v, scalars, FLAGS)
    if FLAGS[1]:
        peak = tl.maximum(peak, v)
        deviation = tl.sqrt(peak) * root + eps
    else:
        deviation = tl.sqrt(v) * root + eps
    update = step_size * m / deviation
    if FLAGS[0]:
        # In one subtraction: the rounding error of p - decay * p alone hardly changes from step to step, and adds up.
        update = update + decay * p
    return p - update, g, m, v, peak


def corrections(beta1: float, beta2: float, step: Any, bias_correction: bool = True) -> tuple[Any, Any]:
    """Return the factors that undo the bias of Adam's moments towards zero: for the first, and for the second's root.

    Rules related to Adam collect the last two arguments as `**bias`.
    """
    if not bias_correction:
        return 1.0, 1.0
    return 1 / (1 - beta1**step), (1 - beta2**step) ** -0.5


def _adam_scalars(*, lr, beta1, beta2, eps, weight_decay, step, bias_correction=True, decoupled=True):
    first, root = corrections(beta1, beta2, step, bias_correction)
    # Not 1 - lr * weight_decay as a factor, whose rounding errors in float32 would add up over the steps.
    decay = lr * weight_decay if decoupled else weight_decay
    return lr * first, 1 - beta1, beta2, 1 - beta2, eps, decay, root


def _guarded_adam(values, whole, scalars, FLAGS):
    """Compute Adam with an optional limit on updates and optional cautious decay.

    FLAGS: decoupled decay; decay only where it has the update's sign (cautious); clamp updates to the limit.
    """
    p, g, m, v, peak = values
    step_size, _rest1, _beta2, _rest2, eps, decay, root, limit = scalars
    m, v = _moments(p, g, m, v, scalars, FLAGS)
    inverse = tl.rsqrt(tl.sqrt(v) * root + eps)
    update = step_size * m * (inverse * inverse)
    if FLAGS[2]:
        update = tl.clamp(update, -limit, limit, tl.PropagateNan.ALL)
    if FLAGS[0]:
        shrink = decay * p
        if FLAGS[1]:
            shrink = tl.where(update * p >= 0, shrink, 0.0)
        update = update + shrink
    return p - update, g, m, v, peak


def _guarded_adam_scalars(**hyper):
    """Return the scalars of Adam, and the limit: the largest update that exact moments can give.

    By Schwarz's inequality |m| / sqrt(v) is at most (1 - beta1) / sqrt((1 - beta2) (1 - beta1 ** 2 / beta2)), for any
    gradients, if the sum of (beta1 ** 2 / beta2) ** k converges.
    """
    numbers = _adam_scalars(**hyper)
    beta1, beta2 = hyper["beta1"], hyper["beta2"]
    if not beta1 * beta1 < beta2:
        return *numbers, float("inf")
    largest = (1 - beta1) * ((1 - beta2) * (1 - beta1 * beta1 / beta2)) ** -0.5
    return *numbers, numbers[0] * largest / numbers[6]


_OF_ADAM: dict[str, Any] = {"scalars": _adam_scalars, "fused": fused.adam, "helpers": (_moments,)}
ADAM = Rule(_adam, reads=(0, 1, 2, 3), writes=(0, 2, 3), **_OF_ADAM)
ADAM_AMSGRAD = Rule(_adam, reads=(0, 1, 2, 3, 4), writes=(0, 2, 3, 4), **_OF_ADAM)
# For encoded moments, whose rounding errors could give updates that no gradients give, and for cautious decay.
GUARDED_ADAM = Rule(
    _guarded_adam, reads=(0, 1, 2, 3), writes=(0, 2, 3), scalars=_guarded_adam_scalars, helpers=(_moments,)
)

# Adam by PyTorch's fused optimizer on a CPU, with its speed and rounding errors (`fused.adam_lists`); on a GPU, ADAM.
ADAM_LISTS, ADAM_AMSGRAD_LISTS = (replace(rule, fused_lists=fused.adam_lists) for rule in (ADAM, ADAM_AMSGRAD))


def _adam_average(values, whole, scalars, FLAGS):
    """Compute Adam and update slot 4, an exponential moving average of the parameter.

    FLAGS: decoupled decay; False (no AMSGrad); start the average at the parameter.
    """
    p, g, m, v, _peak = _adam(values, whole, scalars, FLAGS)
    if FLAGS[2]:
        average = p
    else:
        average = values[4] + scalars[7] * (p - values[4])
    return p, g, m, v, average


def _adam_average_scalars(*, average_decay, **hyper):
    return *_adam_scalars(**hyper), 1 - average_decay


ADAM_AVERAGE = Rule(
    _adam_average, reads=(0, 1, 2, 3, 4), writes=(0, 2, 3, 4), scalars=_adam_average_scalars, helpers=(_moments, _adam)
)
