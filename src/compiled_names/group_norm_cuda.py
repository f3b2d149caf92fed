"""Upstream's compiled module of this name: group norm of channels-last tensors, any groups and channels.

`passes` is accepted and has no effect: the division of work depends on the sizes. `sums` holds mean and variance of
every group of every image.
"""

from __future__ import annotations

from torch import Tensor

from apex.ops.group_norm import group_norm_backward, group_norm_forward
from apex.ops.group_norm.op import check


def forward(
    input: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, passes: int, with_swish: bool
) -> list[Tensor]:
    """Return [output, sums]."""
    check(input, groups, weight, bias, "")
    output, statistics = group_norm_forward(input, weight, bias, groups, eps, with_swish)
    return [output, statistics.flatten()]


def backward(grad_output, sums, input, groups, weight, bias, eps, passes, with_swish) -> list[Tensor | None]:
    """Return [gradient of input, of weight, of bias]."""
    check(input, groups, weight, bias, "")
    statistics = sums.view(-1, groups, 2)
    return list(group_norm_backward(grad_output, input, statistics, weight, bias, groups, eps, with_swish))
