"""Norms of the gradients of a model that is split over processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._distributed import collectives
from . import parallel_state
from .pipeline_parallel.utils import param_is_not_shared
from .tensor_parallel.layers import param_is_not_tensor_parallel_duplicate


def counted(optimizer: Any) -> list[bool]:
    """Whether each parameter of an optimizer, in their order, is one that this process counts in norms."""
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [param_is_not_tensor_parallel_duplicate(each) and (param_is_not_shared(each) or first) for each in params]


def grad_norm(optimizer: Any, is_counted: list[bool], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients over all processes that hold parts of the model, each counted once."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    chosen = [param for param, counts in zip(params, is_counted, strict=True) if counts]
    if getattr(optimizer, "_takes_gradients", False):  # ZeRO
        norm = optimizer.grad_norm(chosen, norm_type)
    else:
        gradients = [param.grad for param in chosen if param.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    group = parallel_state.get_model_parallel_group()
    total = norm.to(params[0].device, torch.float32).reshape(1)
    if dist.get_world_size(group) == 1:
        return total.reshape(())
    if norm_type == torch.inf:
        dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
        return total.reshape(())
    total = total**norm_type
    collectives.all_reduce(total, group, "measuring the norm of all gradients").wait()
    return (total ** (1 / norm_type)).reshape(())
