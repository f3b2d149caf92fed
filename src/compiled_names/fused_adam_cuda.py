"""Upstream's compiled module of this name: the first form of Adam, a form that can be undone, and casts.

`grad_scale` divides the gradients. Mode 0 adds eps below the root of the second moment, mode 1 outside of it. The
moments are not corrected for bias; the step size is. `decay` multiplies the parameter within the step. A tensor without
elements stands for none: no copy of the parameter, no flag.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apex.ops.multi_tensor import rules
from apex.ops.multi_tensor.list_updates import TensorLists, adam_hyper, expect, expect_flag, in_slots, number, update
from apex.ops.multi_tensor.packed_floats import from_bytes, to_bytes
from apex.ops.multi_tensor.packed_floats import maybe_cast as _cast
from apex.ops.multi_tensor.rule import Rule


def _step(
    rule: Rule,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    p_copy: Tensor | None,
    hyper: dict[str, Any],
    mode: int,
    noop: Tensor | None = None,
) -> list[Tensor]:
    slots = [[tensor] for tensor in tensors]
    names = ["p", "g", "m", "v"]
    if p_copy is None:
        return update(rule, (slots, names), hyper, (mode == 0,), noop=noop)
    return update(rule, ([*slots, None, [p_copy]], [*names, "", "p_copy"]), hyper, (mode == 0,), noop=noop)


def strided_check_finite(overflow_flag: Tensor, p_copy: Tensor, stride: int, clear_overflow_first: int) -> None:
    """Set the flag if one of every `stride` elements is not finite; clear it first if requested."""
    expect_flag(overflow_flag, "overflow_flag")
    if stride < 1:
        raise ValueError(f"stride={stride} is not positive")
    looked_at = p_copy.detach().reshape(-1)[::stride]
    values = from_bytes(looked_at) if p_copy.dtype == torch.uint8 else looked_at
    if not values.is_floating_point():
        raise TypeError(f"p_copy is {p_copy.dtype}; floating-point numbers, or bytes, are expected")
    bad = (~torch.isfinite(values).all()).to(overflow_flag.dtype)
    overflow_flag.copy_(bad if clear_overflow_first else torch.maximum(overflow_flag, bad))


def adam(p, p_copy, m, v, g, lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay) -> None:
    """Perform one step of one parameter, and copy the parameter to `p_copy`."""
    hyper = adam_hyper(lr, beta1, beta2, eps, step, bias_correction, decay, scale=number(grad_scale))
    _step(rules.EARLY_ADAM, (p, g, m, v), p_copy if p_copy.numel() else None, hyper, mode)


def adam_mt(
    chunk_size, overflow_flag, tensor_lists, lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay
) -> None:
    """Perform Adam on [parameters, first moments, second moments, gradients (, copies)]; the flag is ignored."""
    expect(tensor_lists, 4, 5)
    named = in_slots(tensor_lists, 0, 3, 1, 2, None, 4 if len(tensor_lists) == 5 else None)
    hyper = adam_hyper(lr, beta1, beta2, eps, step, bias_correction, decay, scale=number(grad_scale))
    update(rules.EARLY_ADAM, named, hyper, (mode == 0,))


@torch.no_grad()
def reversible_adam(p, p_copy, m, v, g, lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay) -> None:
    """Perform `adam`, but skip elements with a non-finite gradient; these make the copy's first element infinite."""
    hyper = adam_hyper(lr, beta1, beta2, eps, step, bias_correction, decay, scale=number(grad_scale))
    in_bytes = p_copy.dtype == torch.uint8
    if p_copy.numel() not in (0, p.numel()):
        raise ValueError(f"p_copy has {p_copy.numel()} elements, p has {p.numel()}")
    results = _step(
        rules.REVERSIBLE_ADAM, (p, g, m, v), p_copy if p_copy.numel() and not in_bytes else None, hyper, mode
    )
    if p_copy.numel():
        if in_bytes:
            p_copy.copy_(to_bytes(p.detach()).view(p_copy.shape))
        first = p_copy.view(-1)[:1]
        infinite = to_bytes(first.new_full((1,), torch.inf, dtype=torch.float32)) if in_bytes else torch.inf
        first.copy_(torch.where(results[0][0, 0] > 0, infinite, first))


def maybe_adam_undo(
    overflow_flag, p, m, v, g, lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay
) -> None:
    """Undo a step of `reversible_adam`, up to rounding, if the flag is set or there is no flag."""
    hyper = adam_hyper(lr, beta1, beta2, eps, step, bias_correction, decay, scale=number(grad_scale))
    noop = None
    if overflow_flag.numel():
        noop = (expect_flag(overflow_flag, "overflow_flag") == 0).to(torch.int32)
    _step(rules.ADAM_UNDO, (p, g, m, v), None, hyper, mode, noop)


def maybe_cast(overflow_flag: Tensor, p_in: Tensor, p_out: Tensor) -> None:
    """Copy `p_in` to `p_out`, of any dtypes (bytes are 8-bit floats), unless the flag is set."""
    _cast([p_in], [p_out], overflow_flag if overflow_flag.numel() else None, ("p_out", "p_in"))


def maybe_cast_mt(chunk_size: int, overflow_flag: Tensor, tensor_lists: TensorLists) -> None:
    """Perform `maybe_cast` on each pair of [inputs, outputs]."""
    expect(tensor_lists, 2)
    flag = overflow_flag if overflow_flag.numel() else None
    _cast(tensor_lists[0], tensor_lists[1], flag, ("tensor_lists[1]", "tensor_lists[0]"))
