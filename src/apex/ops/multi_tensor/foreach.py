"""The elementary passes by PyTorch's own loops over lists, on the CPU, where they are quicker than pieces and rules."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._transfer import HOST
from . import rules
from .rule import Rule

if TYPE_CHECKING:
    from .torch_lists import TorchLists

# PyTorch adds up squares in a few running sums: 16 million elements lose 2e-3 of their norm, pieces of 32768 lose 2e-7.
_PIECE = 1 << 15
# Tensors of at most so many elements are strung together for a norm, until there are so many.
_STRUNG = 1 << 14
_STRUNG_TOGETHER = 1 << 20
# PyTorch's loss scaler looks at single elements while it scales them: 1 us for a tensor of 256 elements and 65 us for
# one of 65536, where a norm and a product take 6 and 38.
_LOOKED_AT_ONCE = 1 << 13


_flatten = torch._C._nn.flatten_dense_tensors


def measure(rule: Rule, lists: TorchLists, hyper: dict[str, Any], grad_scale: Tensor | None) -> Tensor | None:
    """Squares or largest values of the tensors in slot 1, float64 [tensors, 2]; None where this is no way to them."""
    tensors = lists.slots[1]
    if lists.device.type != "cpu" or tensors is None or rule not in (rules.SQUARE_SUM, rules.MAXIMUM):
        return None
    found = torch.zeros(len(tensors), 2, dtype=torch.float64, device=HOST)
    if rule is rules.MAXIMUM:
        factor = _factor({}, grad_scale)
        extremes = [torch.stack(torch.aminmax(tensor)) if tensor.numel() else tensor.new_zeros(2) for tensor in tensors]
        found[:, 0] = torch.stack(extremes).to(torch.float64).abs().amax(1) * abs(factor)
    else:
        found[:, 0] = square_sums(tensors) * _factor(hyper, grad_scale) ** 2
    return found


def scale(
    rule: Rule,
    lists: TorchLists,
    hyper: dict[str, Any],
    grad_scale: Tensor | None,
    overflow: Tensor | None,
    culprits: Tensor | None = None,
) -> bool:
    """Scales slot 1 into slot 0; says whether it did. Not where many elements must be counted that are not finite."""
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
    if outputs[0].dtype.itemsize < 4 and factor != torch.tensor(factor, dtype=outputs[0].dtype, device=HOST).item():
        return False
    targets = list(outputs)
    # Scaling changes nothing about what is infinite or NaN, so that it can be counted afterwards.
    at_once = outputs[0].dtype == torch.float32 and (culprits is None or 0 < abs(factor) <= 1)
    if overflow is not None and at_once and sum(lists.sizes) < _LOOKED_AT_ONCE * len(targets):
        if outputs is not inputs:
            _copy(inputs, targets)
        found = torch.zeros(1, dtype=torch.float32, device=HOST)
        torch._amp_foreach_non_finite_check_and_unscale_(targets, found, torch.full_like(found, factor))
        if found.item():
            overflow.fill_(1)
            if culprits is not None:
                counts = [[tensor.isinf().sum(), tensor.isnan().sum()] for tensor in targets]
                culprits += torch.tensor(counts, dtype=culprits.dtype, device=culprits.device)
        return True
    if overflow is not None and not math.isfinite(_square_sum_of_all(inputs, lists.sizes)):
        return False
    _copy(inputs, targets)
    if factor != 1.0:
        # A number would be made a tensor for each of them, which takes longer than to multiply small ones.
        torch._foreach_mul_(targets, torch.tensor(factor, dtype=targets[0].dtype, device=HOST))
    return True


def _copy(inputs: Sequence[Tensor], targets: list[Tensor]) -> None:
    if not all(map(operator.is_, targets, inputs)):
        torch._foreach_copy_(
            targets, [tensor.view(target.shape) for target, tensor in zip(targets, inputs, strict=True)]
        )


def _factor(hyper: dict[str, Any], grad_scale: Tensor | None) -> float:
    factor = float(hyper.get("factor", 1.0))
    return factor if grad_scale is None else factor * float(grad_scale)


def square_sum(tensor: Tensor) -> Tensor:
    """The sum of the squares of a tensor's elements, float64."""
    return _joined(_norms_of_pieces(tensor))


def total(rule: Rule, lists: TorchLists, hyper: dict[str, Any], grad_scale: Tensor | None) -> Tensor | None:
    """The sum of the squares of all tensors in slot 1, float64; None where this is no way to it."""
    tensors = lists.slots[1]
    if lists.device.type != "cpu" or tensors is None or rule is not rules.SQUARE_SUM:
        return None
    return _square_sum_of_all(tensors, lists.sizes) * _factor(hyper, grad_scale) ** 2


def _square_sum_of_all(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Small tensors are strung together: to copy one takes half the time of a call for its norm."""
    norms: list[Tensor] = []
    strung: list[Tensor] = []
    elements = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        if size > _STRUNG:
            norms += _norms_of_pieces(tensor)
            continue
        strung.append(tensor)
        elements += size
        if elements > _STRUNG_TOGETHER:
            norms += _norms_of_pieces(_flatten(strung))
            strung, elements = [], 0
    if strung:
        norms += _norms_of_pieces(_flatten(strung))
    return _joined(norms)


def _joined(norms: list[Tensor]) -> Tensor:
    """The sum of the squares of all norms, float64."""
    return (
        torch.cat(norms).to(torch.float64).square_().sum()
        if norms
        else torch.zeros((), dtype=torch.float64, device=HOST)
    )


def square_sums(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of each tensor's elements, float64 [tensors]."""
    sizes = list(map(Tensor.numel, tensors))
    if max(sizes, default=0) <= _PIECE:
        return _norms(list(tensors)).square()
    sums = torch.empty(len(tensors), dtype=torch.float64, device=HOST)
    small = [index for index, size in enumerate(sizes) if size <= _PIECE]
    if small:
        sums[torch.tensor(small, dtype=torch.int64, device=HOST)] = _norms([tensors[index] for index in small]).square()
    for index, size in enumerate(sizes):
        if size > _PIECE:
            sums[index] = square_sum(tensors[index])
    return sums


def _norms_of_pieces(tensor: Tensor) -> list[Tensor]:
    """Norms of so many elements at once that they are exact, in vectors."""
    elements = tensor.reshape(-1)
    if elements.dtype.itemsize < 4:
        return [_norms(list(elements.split(_PIECE)))] if elements.numel() else []
    whole = elements.numel() // _PIECE * _PIECE
    norms = [torch.linalg.vector_norm(elements[:whole].view(-1, _PIECE), dim=1)] if whole else []
    return (
        norms
        if whole == elements.numel()
        else [*norms, torch.linalg.vector_norm(elements[whole:], dim=0, keepdim=True)]
    )


def _norms(tensors: list[Tensor]) -> Tensor:
    """float64 [tensors], for tensors of at most a piece."""
    if tensors[0].dtype.itemsize < 4:
        # Squares of half-precision numbers end in zeros, which a running sum rounds the same way again and again.
        return torch.stack([tensor.float().square_().sum() for tensor in tensors]).to(torch.float64).sqrt()
    return torch.stack(torch._foreach_norm(tensors)).to(torch.float64)
