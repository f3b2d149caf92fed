"""How an autograd Function can be made of operators that have their own derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops._library import once_differentiable


def forward_with_graph(
    ctx: Any, compute: Callable[..., Tensor], tensors: Sequence[Tensor | None], wanted: Sequence[bool]
) -> Tensor:
    """compute(*tensors), keeping the graph that leads back to those that want a gradient."""
    leaves = [None if t is None else t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
    with torch.enable_grad():
        ctx.output = compute(*leaves)
    ctx.leaves = leaves
    return ctx.output.detach()


@once_differentiable
def backward_through_graph(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """A gradient, or None, for each of the tensors that `forward_with_graph` was given."""
    wanted = [leaf for leaf in ctx.leaves if leaf is not None and leaf.requires_grad]
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    gradients = iter(torch.autograd.grad(ctx.output, wanted, gradient, retain_graph=keep))
    return tuple(next(gradients) if leaf is not None and leaf.requires_grad else None for leaf in ctx.leaves)
