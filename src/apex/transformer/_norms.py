"""Norms of the gradients of a model that is split over processes."""

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

# Kinds of parameters by the ranks that hold one copy of all of them together.
DENSE, EXPERT = "dense", "expert"


def counted(optimizer: Any) -> list[str | None]:
    """Return for each parameter of an optimizer, in their order, its kind, or None if another process counts it."""
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [
        (EXPERT if is_expert(each) else DENSE)
        if param_is_not_tensor_parallel_duplicate(each) and (param_is_not_shared(each) or first)
        else None
        for each in params
    ]


def grad_norm(optimizer: Any, kinds: list[str | None], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients over all processes that hold parts of the model, each counted once.

    `kinds` is what `counted` has returned. All processes return the same number.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    device = params[0].device
    groups = {DENSE: parallel_state.get_model_parallel_group()}
    is_zero = getattr(optimizer, "_takes_gradients", False)
    # Without expert parallelism both kinds have the same ranks. Else all ranks measure both, whether they have experts
    # or not. ZeRO optimizers hold none.
    if parallel_state.get_expert_model_parallel_world_size() > 1 and not is_zero:
        groups[EXPERT] = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    norms = []
    for kind, group in groups.items():
        wanted = {kind} if len(groups) > 1 else {DENSE, EXPERT}
        chosen = [param for param, each in zip(params, kinds, strict=True) if each in wanted]
        if is_zero:
            norm = optimizer.grad_norm(chosen, norm_type)
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in chosen if p.grad is not None], norm_type)
        norms.append(_over_group(norm, group, norm_type, device))
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _over_group(norm: Tensor, group: Any, norm_type: float, device: torch.device) -> Tensor:
    """Return the norm, a float32 scalar, of what all processes of a group have measured."""
    total = norm.to(device, torch.float32).reshape(1)
    if dist.get_world_size(group) == 1:
        return total.reshape(())
    if norm_type == torch.inf:
        dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
        return total.reshape(())
    total = total**norm_type
    collectives.all_reduce(total, group, "measuring the norm of all gradients").wait()
    return (total ** (1 / norm_type)).reshape(())
