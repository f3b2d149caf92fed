"""Update rules by PyTorch's own fused optimizers: on a CPU one pass over memory, where operators take ten and more.

A rule's `fused(values, scalars, flags)` computes the same as the rule's function, in place. It returns False, with
nothing changed, if PyTorch has no such formula. If sizes are multiples of `WIDTH`, the resulting bits depend only on
the numbers: PyTorch's kernels work on vectors of up to 64 bytes, and round differently in a tensor's remainder.

A rule's `fused_lists(slots, scalars, flags)` takes all tensors in one call, of any size. It is as quick as PyTorch's
optimizer, and has its rounding errors: bits depend on where tensors end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

WIDTH = 16


def adam(values: Sequence[Any], scalars: Sequence[float], flags: Sequence[bool]) -> bool:
    """Run PyTorch's Adam at step infinity, where its bias corrections are 1: the numbers already include them."""
    p, g, m, v, peak = values
    step_size, rest1, beta2, rest2, eps, decay, root, _unused = scalars
    decoupled, amsgrad, _ = flags
    if not (rest1 > 0 and rest2 > 0):
        return False
    update = p * -decay if decoupled and decay else p
    steps = [torch.full((), torch.inf, dtype=torch.float32, device=p.device)]
    options: dict[str, Any] = {"lr": step_size / root, "beta1": 1 - rest1, "beta2": beta2, "eps": eps / root}
    options |= {"weight_decay": 0.0 if decoupled else decay, "amsgrad": amsgrad, "maximize": False}
    torch._fused_adam_([update], [g], [m], [v], [peak] if amsgrad else [], steps, **options)
    if update is not p:  # PyTorch's AdamW multiplies by 1 - decay, whose rounding errors add up over the steps
        p.add_(update)
    return True


def adam_lists(slots: Sequence[Any], scalars: Sequence[float], flags: Sequence[bool]) -> bool:
    """Run PyTorch's Adam or AdamW over lists at step infinity, see `adam`.

    AdamW multiplies parameters by 1 - decay in their own precision: in float32 the decay is off by up to 6e-8.
    """
    params, gradients, m, v, peaks = slots
    step_size, rest1, beta2, rest2, eps, decay, root, _unused = scalars
    decoupled, amsgrad, _ = flags
    rate = step_size / root
    if not (rest1 > 0 and rest2 > 0) or (decoupled and decay and not rate):
        return False
    steps = [torch.full((), torch.inf, dtype=torch.float32, device=params[0].device)] * len(params)
    options: dict[str, Any] = {"lr": rate, "beta1": 1 - rest1, "beta2": beta2, "eps": eps / root}
    options |= {"weight_decay": decay / rate if decoupled and decay else decay}
    function = torch._fused_adamw_ if decoupled else torch._fused_adam_
    function(params, gradients, m, v, peaks if amsgrad else [], steps, **options, amsgrad=amsgrad, maximize=False)
    return True


def sgd(values: Sequence[Any], scalars: Sequence[float], flags: Sequence[bool]) -> bool:
    """Run PyTorch's SGD; the first step, which replaces the momentum buffer, is passed as such."""
    p, g, buffer, _a, _b = values
    lr, keep, rest, decay, momentum, *_ = scalars
    nesterov, decays_late, half_buffers = flags
    if half_buffers or (decays_late and decay) or isinstance(buffer, float) != (momentum == 0):
        return False
    options: dict[str, Any] = {"lr": lr, "momentum": momentum, "dampening": 1 - rest, "weight_decay": decay}
    options |= {"nesterov": nesterov, "maximize": False, "is_first_step": keep != momentum}
    torch._fused_sgd_([p], [g], [buffer] if momentum else [], **options)
    return True


def adagrad(values: Sequence[Any], scalars: Sequence[float], flags: Sequence[bool]) -> bool:
    """Run PyTorch's Adagrad; the numbers already include a decay of the learning rate."""
    p, g, total, _a, _b = values
    lr, eps, decay, *_ = scalars
    if flags[0] and decay:
        return False
    steps = [torch.ones((), dtype=torch.float32, device=p.device)]
    torch._fused_adagrad_([p], [g], [total], steps, lr=lr, lr_decay=0.0, weight_decay=decay, eps=eps, maximize=False)
    return True
