"""Upstream's second compiled group norm of channels-last tensors, any groups and channels.

`sm_margin` is accepted and has no effect: these kernels do not take the whole device.
"""

from __future__ import annotations

from torch import Tensor

from apex.ops.group_norm import group_norm_backward, group_norm_forward
from apex.ops.group_norm.op import check


def gn(x, w, b, eps, silu, num_groups, mean_var_out=None, sm_margin=0) -> Tensor:
    """Return the output; write mean and variance of every group, [N, G, 2], to `mean_var_out` if it is given."""
    check(x, num_groups, w, b, "")
    if mean_var_out is not None and mean_var_out.numel() != x.shape[0] * num_groups * 2:
        raise ValueError(f"mean_var_out has shape {list(mean_var_out.shape)}, expected {[x.shape[0], num_groups, 2]}")
    output, statistics = group_norm_forward(x, w, b, num_groups, eps, silu)
    if mean_var_out is not None:
        mean_var_out.copy_(statistics.view(mean_var_out.shape))
    return output


def gn_bwd(
    grad_output, x, w, b, mean_var, eps, silu, num_groups, sm_margin=0
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, w and b."""
    check(x, num_groups, w, b, "")
    return group_norm_backward(grad_output, x, mean_var.view(-1, num_groups, 2), w, b, num_groups, eps, silu)
