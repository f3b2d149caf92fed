"""Gradient norms of a model that is split over processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._distributed import collectives
from .._distributed.experts import is_expert
from . import parallel_state
from .pipeline_parallel.utils import param_is_not_shared
from .tensor_parallel.layers import param_is_not_tensor_parallel_duplicate

# Kinds of parameters. Each kind has its own group of ranks that together hold one copy of the parameters.
DENSE, EXPERT = "dense", "expert"


def counted(optimizer: Any) -> list[str | None]:
    """Return "dense" or "expert" for each parameter of an optimizer; None if another process adds it to the norm."""
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [
        (EXPERT if is_expert(param) else DENSE)
        if param_is_not_tensor_parallel_duplicate(param) and (param_is_not_shared(param) or first)
        else None
        for param in params
    ]


def grad_norm(optimizer: Any, kinds: list[str | None], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients over all processes that hold parts of the model, each counted once.

    `kinds` is the result of `counted`. All processes return the same number.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    device = params[0].device
    groups = {DENSE: parallel_state.get_model_parallel_group()}
    is_zero = getattr(optimizer, "_takes_gradients", False)
    # One reduction if both kinds have the same group; else two, which ranks without experts must join as well.
    experts = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    if experts is not groups[DENSE]:
        groups[EXPERT] = experts
    norms = []
    for kind, group in groups.items():
        selected_kinds = {kind} if len(groups) > 1 else {DENSE, EXPERT}
        chosen = [param for param, param_kind in zip(params, kinds, strict=True) if param_kind in selected_kinds]
        if is_zero:
            norm = optimizer.grad_norm(chosen, norm_type)
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in chosen if p.grad is not None], norm_type)
        norms.append(_over_group(norm, group, norm_type, device))
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _over_group(norm: Tensor, group: Any, norm_type: float, device: torch.device) -> Tensor:
    """Combine the norms of all processes of a group into one float32 scalar."""
    total = norm.to(device, torch.float32).reshape(1)
    if dist.get_world_size(group) == 1:
        return total.reshape(())
    if norm_type == torch.inf:
        dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
        return total.reshape(())
    total = total**norm_type
    collectives.all_reduce(total, group, "measuring the norm of all gradients").wait()
    return (total ** (1 / norm_type)).reshape(())
