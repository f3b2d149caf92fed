"""LAMB on the CPU: both of its passes, a few tensors at a time, so that the step is computed once and kept."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import foreach, rules

if TYPE_CHECKING:
    from .torch_lists import TorchLists

# Elements of the tensors that are updated together: what is computed for them is still in a cache when it is used.
_TOGETHER = 1 << 18
# A larger tensor is left to the rules, which need no memory for its step.
_LARGEST = 1 << 24

_shape = operator.attrgetter("shape")


def apply(
    lists: TorchLists, hyper: dict[str, Any], flags: tuple[bool, ...], grad_scale: Tensor | None, seed: int | None
) -> bool:
    """Takes the step of `rules.LAMB_MOMENTS` and `rules.LAMB_STEP` if it can; says whether it did."""
    params, gradients, first, second = lists.slots[:4]
    assert params
    assert gradients
    assert first
    assert second
    dtype = params[0].dtype
    if lists.device.type != "cpu" or seed is not None or max(lists.sizes) > _LARGEST:
        return False
    if dtype.itemsize < 4 or first[0].dtype != dtype or second[0].dtype != dtype:
        return False
    used = [tensors for tensors in (params, gradients, first, second, lists.copy) if tensors]
    if not lists.same_layout or any(list(map(_shape, tensors)) != list(map(_shape, params)) for tensors in used):
        return False
    factor = 1.0 if grad_scale is None else float(grad_scale)
    numbers = tuple(map(float, rules.LAMB_MOMENTS.scalars(**hyper)))
    for indices in _batches(lists.sizes):
        p, g, m, v, *copies = ([tensors[index] for index in indices] for tensors in used)
        if g[0].dtype != dtype:
            g = [gradient.to(dtype) for gradient in g]
        _step(p, g, m, v, numbers, hyper["beta2"], factor, decoupled=flags[0])
        if copies:
            torch._foreach_copy_(copies[0], p)
    return True


def _batches(sizes: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    elements = 0
    for index, size in enumerate(sizes):
        if batch and elements + size > _TOGETHER:
            yield batch
            batch, elements = [], 0
        if size:
            batch.append(index)
            elements += size
    if batch:
        yield batch


def _step(
    p: list[Tensor],
    g: list[Tensor],
    m: list[Tensor],
    v: list[Tensor],
    numbers: tuple[float, ...],
    beta2: float,
    factor: float,
    decoupled: bool,
) -> None:
    lr, correction, beta1, share, eps, decay, root, rest = numbers

    def number(value: float) -> Any:
        # PyTorch makes a tensor of a number for every tensor of a list, which takes longer than to work on small ones.
        return value if len(p) == 1 else torch.tensor(value, dtype=p[0].dtype, device=p[0].device)

    if decay and not decoupled:
        g = list(torch._foreach_add(torch._foreach_mul(g, number(factor)), p, alpha=decay))
        factor = 1.0
    torch._foreach_mul_(m, number(beta1))
    torch._foreach_add_(m, g, alpha=share * factor)
    torch._foreach_mul_(v, number(beta2))
    torch._foreach_addcmul_(v, g, g, value=rest * factor * factor)
    # Steps are kept over `scale`: m / (sqrt(v) + eps / root) + decay / scale * p.
    scale = correction / root
    deviations = torch._foreach_sqrt(v)
    torch._foreach_add_(deviations, number(eps / root))
    if decay and decoupled:
        steps = torch._foreach_mul(p, number(decay / scale))
        torch._foreach_addcdiv_(steps, m, deviations)
    else:
        steps = torch._foreach_div(m, deviations)
    lengths, reaches = foreach.square_sums(p), foreach.square_sums(steps)
    ratios = torch.where((lengths > 0) & (reaches > 0), (lengths / reaches).sqrt() / scale, 1.0)
    shares = ratios.mul_(lr * scale)
    if len(p) == 1:
        p[0].sub_(steps[0], alpha=shares.item())
    else:
        torch._foreach_addcmul_(p, steps, list(shares.to(p[0].dtype).unbind()), value=-1.0)
