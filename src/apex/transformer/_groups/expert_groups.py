"""Groups of experts, and groups that count the tokens of experts; `apex.transformer.parallel_state` exports them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..._arguments import checked
from .state import STATE


def get_expert_model_parallel_group() -> Any:
    """Return the group of ranks that hold different experts of the same layers."""
    return STATE.group("expert", "expert model parallel group")


def get_expert_data_parallel_group() -> Any:
    """Return the group of ranks that hold the same experts."""
    return STATE.group("expert_data", "expert data parallel group")


def get_expert_tensor_parallel_group() -> Any:
    """Return the group of ranks that hold the parts of the same experts."""
    return STATE.group("expert_tensor", "expert tensor parallel group")


def get_expert_tensor_and_model_parallel_group() -> Any:
    """Return the group of ranks that together hold one copy of the experts of a layer."""
    return STATE.group("expert_tensor_model", "expert tensor and model parallel group")


def get_expert_tensor_model_pipeline_parallel_group() -> Any:
    """Return the group of ranks that together hold one copy of all experts."""
    return STATE.group("expert_model", "expert tensor, model and pipeline parallel group")


def get_tensor_and_context_parallel_group() -> Any:
    """Return the group of ranks that process parts of the same sequences."""
    return STATE.group("tensor_context", "tensor and context parallel group")


@checked
def get_tensor_and_data_parallel_group(with_context_parallel: bool = False) -> Any:
    """Return the group of tensor-parallel ranks and their replicas.

    With `with_context_parallel` it also includes the ranks that process other parts of the same sequences, so that it
    has all ranks of a pipeline stage.
    """
    kind = "tensor_data_context" if with_context_parallel else "tensor_data"
    return STATE.group(kind, "tensor and data parallel group")


def get_expert_model_parallel_world_size() -> int:
    """Return the number of ranks over which experts are split."""
    return dist.get_world_size(get_expert_model_parallel_group())


def get_expert_model_parallel_rank() -> int:
    """Return the index of this process's part of the experts."""
    return dist.get_rank(get_expert_model_parallel_group())


def get_expert_data_parallel_world_size() -> int:
    """Return the number of ranks that hold the same experts."""
    return dist.get_world_size(get_expert_data_parallel_group())


def get_expert_data_parallel_rank() -> int:
    """Return this process's rank among the processes with the same experts."""
    return dist.get_rank(get_expert_data_parallel_group())


def get_expert_tensor_parallel_world_size() -> int:
    """Return the number of ranks over which each expert is split."""
    return dist.get_world_size(get_expert_tensor_parallel_group())


def get_expert_tensor_parallel_rank() -> int:
    """Return the index of this process's part of each of its experts."""
    return dist.get_rank(get_expert_tensor_parallel_group())


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Return the number of ranks that together hold one copy of the experts of a layer."""
    return dist.get_world_size(get_expert_tensor_and_model_parallel_group())


def get_expert_tensor_and_model_parallel_rank() -> int:
    """Return this process's rank among the processes that together hold one copy of a layer's experts."""
    return dist.get_rank(get_expert_tensor_and_model_parallel_group())
