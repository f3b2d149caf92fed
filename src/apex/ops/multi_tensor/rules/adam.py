"""Adam and AdamW, with or without AMSGrad or an average of the parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .. import fused
from ..rule import Rule, tl


def _adam(values, whole, scalars, FLAGS):
    """Compute Adam. FLAGS: decay decoupled from the gradient, AMSGrad."""
    p, g, m, v, peak = values
    step_size, rest1, beta2, rest2, eps, decay, root, _unused = scalars
    if not FLAGS[0]:
        g = g + decay * p
    m = m + (g - m) * rest1
    v = tl.fma(v, beta2, rest2 * g * g)
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


ADAM = Rule(_adam, reads=(0, 1, 2, 3), writes=(0, 2, 3), scalars=_adam_scalars, fused=fused.adam)
ADAM_AMSGRAD = Rule(_adam, reads=(0, 1, 2, 3, 4), writes=(0, 2, 3, 4), scalars=_adam_scalars, fused=fused.adam)

# As quick as PyTorch's fused optimizer on a CPU, with its rounding errors: see `fused.adam_lists`. On a GPU, ADAM.
ADAM_LISTS, ADAM_AMSGRAD_LISTS = (replace(rule, fused_lists=fused.adam_lists) for rule in (ADAM, ADAM_AMSGRAD))


def _adam_average(values, whole, scalars, FLAGS):
    """Compute Adam; slot 4 is an average that follows the parameter.

    FLAGS: as Adam's, no AMSGrad; start the average.
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
    _adam_average, reads=(0, 1, 2, 3, 4), writes=(0, 2, 3, 4), scalars=_adam_average_scalars, helpers=(_adam,)
)
