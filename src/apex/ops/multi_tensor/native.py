"""PyTorch's own fused optimizers, on the CPU where they are quicker than a loop of operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._transfer import HOST
from . import rules
from .rule import GRADIENT, Rule

if TYPE_CHECKING:
    from .torch_lists import TorchLists

# Elements of gradients that are copied at once: 64 MB. PyTorch's fused steps take 30 us per call before they begin.
BATCH = 1 << 24

# A step so far on that every bias correction is exactly 1.
_NEVER_CORRECTED = 1e9


def _adam(slots: Sequence[Any], hyper: dict[str, Any], flags: tuple[bool, ...]) -> None:
    params, grads, first, second, peaks = slots
    corrected = hyper.get("bias_correction", True)
    step = float(hyper["step"]) if corrected else _NEVER_CORRECTED
    function = torch._fused_adamw_ if flags[0] else torch._fused_adam_
    lr, weight_decay = float(hyper["lr"]), hyper["weight_decay"]
    if flags[0] and params[0].dtype == torch.float32:
        weight_decay = _fair_decay(lr, weight_decay, int(hyper["step"]))
    function(
        params,
        grads,
        first,
        second,
        peaks or [],
        [torch.tensor(step, dtype=torch.float32, device=HOST)] * len(params),
        lr=lr,
        beta1=hyper["beta1"],
        beta2=hyper["beta2"],
        weight_decay=weight_decay,
        eps=hyper["eps"],
        amsgrad=len(flags) > 1 and flags[1],
        maximize=False,
    )


def _adam_average(slots: Sequence[Any], hyper: dict[str, Any], flags: tuple[bool, ...]) -> None:
    *adam, averages = slots
    _adam((*adam, None), hyper, flags[:1])
    if flags[2]:
        torch._foreach_copy_(averages, slots[0])
    else:
        torch._foreach_lerp_(averages, slots[0], 1 - hyper["average_decay"])


def _fair_decay(lr: float, weight_decay: float, step: int) -> float:
    """A weight decay whose factor float32 can hold, over many steps equal to the one asked for.

    PyTorch multiplies by 1 - lr * weight_decay in float32, whose rounding adds up: to 1.6e-6 in 100 steps with a factor
    of 0.9999. So it is rounded up in some steps and down in the others.
    """
    factor = 1 - lr * weight_decay
    if not 0 < factor < 1:
        return weight_decay
    unit = 2.0 ** (math.frexp(factor)[1] - 24)
    below = math.floor(factor / unit)
    share = factor / unit - below
    up = math.floor(step * share) > math.floor((step - 1) * share)
    return (1 - (below + up) * unit) / lr


def _sgd(slots: Sequence[Any], hyper: dict[str, Any], flags: tuple[bool, ...]) -> None:
    params, grads, buffers = slots[:3]
    torch._fused_sgd_(
        params,
        grads,
        buffers or [],
        weight_decay=hyper.get("weight_decay", 0.0),
        momentum=hyper.get("momentum", 0.0) if buffers else 0.0,
        lr=float(hyper["lr"]),
        dampening=hyper.get("dampening", 0.0),
        nesterov=bool(flags) and flags[0],
        maximize=False,
        is_first_step=bool(hyper.get("first", False)),
    )


def _adagrad(slots: Sequence[Any], hyper: dict[str, Any], flags: tuple[bool, ...]) -> None:
    params, grads, sums = slots[:3]
    torch._fused_adagrad_(
        params,
        grads,
        sums,
        [torch.ones((), dtype=torch.float32, device=HOST)]
        * len(params),  # PyTorch looks at the step only to let the learning rate decay
        lr=float(hyper["lr"]),
        lr_decay=0.0,
        weight_decay=hyper.get("weight_decay", 0.0),
        eps=hyper["eps"],
        maximize=False,
    )


_FUNCTIONS: dict[Rule, Callable[..., None]] = {
    rules.ADAGRAD: _adagrad,
    rules.ADAM: _adam,
    rules.ADAM_AMSGRAD: _adam,
    rules.ADAM_AVERAGE: _adam_average,
    rules.SGD: _sgd,
    rules.PLAIN_SGD: _sgd,
}


def apply(
    rule: Rule,
    lists: TorchLists,
    hyper: dict[str, Any],
    flags: tuple[bool, ...],
    grad_scale: Tensor | None,
    seed: int | None,
) -> bool:
    """Runs PyTorch's fused step if it computes this rule on these lists; says whether it did.

    Gradients of another dtype, or that are to be scaled, are copied for it, as many at once as bound the copies.
    """
    function = _FUNCTIONS.get(rule)
    if function is None or lists.device.type != "cpu" or seed is not None:
        return False
    if not lists.same_layout:  # PyTorch's loops run over memory and know no strides
        return False
    params, gradients, *state = lists.slots
    assert params
    assert gradients
    dtype, given = params[0].dtype, gradients[0].dtype
    if any(tensors[0].dtype != dtype for tensors in state if tensors):
        return False
    if dtype not in (torch.float32, torch.float64) or given.itemsize > dtype.itemsize:
        return False
    if rule is rules.SGD and len(flags) > 1 and flags[1]:  # weight decay after the momentum
        return False
    if rule is rules.ADAGRAD and flags and flags[0] and hyper.get("weight_decay"):  # decoupled decay
        return False
    if given == dtype and grad_scale is None and not lists.copy:
        function(lists.slots, hyper, flags)
        return True
    scratch = torch.empty(0, dtype=dtype, device=HOST)
    for slots, copies in lists.batches(BATCH):
        if given != dtype or grad_scale is not None:
            elements = sum(map(Tensor.numel, slots[GRADIENT]))
            if elements > scratch.numel():
                scratch = torch.empty(elements, dtype=dtype, device=HOST)
            cast = torch._C._nn.unflatten_dense_tensors(scratch, slots[GRADIENT])
            torch._foreach_copy_(cast, slots[GRADIENT])
            slots[GRADIENT] = cast
        if grad_scale is not None:
            torch._foreach_mul_(slots[GRADIENT], float(grad_scale))
        function(slots, hyper, flags)
        if copies:
            torch._foreach_copy_(copies, slots[0])
    return True
