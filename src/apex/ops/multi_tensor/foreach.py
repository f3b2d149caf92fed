"""The elementary passes by PyTorch's own loops over lists, on the CPU, where they are quicker than pieces and rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import rules
from .rule import Rule

if TYPE_CHECKING:
    from .torch_lists import TorchLists

# PyTorch adds up squares in a few running sums: 16 million elements lose 2e-3 of their norm, pieces of 32768 lose 2e-7.
_PIECE = 1 << 15


def measure(rule: Rule, lists: TorchLists, hyper: dict[str, Any], grad_scale: Tensor | None) -> Tensor | None:
    """Squares or largest values of the tensors in slot 1, float64 [tensors, 2]; None where this is no way to them."""
    tensors = lists.slots[1]
    if lists.device.type != "cpu" or tensors is None or rule not in (rules.SQUARE_SUM, rules.MAXIMUM):
        return None
    found = torch.zeros(len(tensors), 2, dtype=torch.float64)
    if rule is rules.MAXIMUM:
        factor = _factor({}, grad_scale)
        extremes = [torch.stack(torch.aminmax(tensor)) if tensor.numel() else tensor.new_zeros(2) for tensor in tensors]
        found[:, 0] = torch.stack(extremes).to(torch.float64).abs().amax(1) * abs(factor)
    else:
        found[:, 0] = _square_sums(tensors) * _factor(hyper, grad_scale) ** 2
    return found


def scale(
    rule: Rule, lists: TorchLists, hyper: dict[str, Any], grad_scale: Tensor | None, overflow: Tensor | None
) -> bool:
    """Scales slot 1 into slot 0; says whether it did. Nothing is done where an element may not be finite."""
    if rule is not rules.SCALE or lists.device.type != "cpu" or lists.copy or not lists.same_layout:
        return False
    outputs, inputs = lists.slots[:2]
    assert outputs is not None
    assert inputs is not None
    # Rounding before scaling is not the same as after it.
    if torch.promote_types(outputs[0].dtype, inputs[0].dtype) != outputs[0].dtype:
        return False
    factor = _factor(hyper, grad_scale)
    # PyTorch rounds a number to the tensors' dtype before it multiplies them.
    if outputs[0].dtype.itemsize < 4 and factor != float(torch.tensor(factor, dtype=outputs[0].dtype)):
        return False
    if overflow is not None and not math.isfinite(_square_sums(inputs).sum()):
        return False
    targets = list(outputs)
    if any(target is not tensor for target, tensor in zip(targets, inputs, strict=True)):
        sources = [tensor.view(target.shape) for target, tensor in zip(targets, inputs, strict=True)]
        torch._foreach_copy_(targets, sources)
    if factor != 1.0:
        torch._foreach_mul_(targets, factor)
    return True


def _factor(hyper: dict[str, Any], grad_scale: Tensor | None) -> float:
    factor = float(hyper.get("factor", 1.0))
    return factor if grad_scale is None else factor * float(grad_scale)


def _square_sums(tensors: Sequence[Tensor]) -> Tensor:
    """float64 [tensors]."""
    pieces = [tensor.reshape(-1).split(_PIECE) for tensor in tensors]
    every = list(chain.from_iterable(pieces))
    if tensors[0].dtype.itemsize < 4:
        # Squares of half-precision numbers end in zeros, which a running sum rounds the same way again and again.
        squares = torch.stack([piece.float().square_().sum() for piece in every]).to(torch.float64)
    else:
        squares = torch.stack(torch._foreach_norm(every)).to(torch.float64).square()
    owner = torch.repeat_interleave(torch.tensor(list(map(len, pieces))))
    return torch.zeros(len(tensors), dtype=torch.float64).index_add_(0, owner, squares)
