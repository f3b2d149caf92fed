"""Collectives over several groups at once."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gather_into_flat_tensor_nd"]


def all_gather_into_flat_tensor_nd(output_tensor: Tensor, input_tensor: Tensor, group: Any = None) -> None:
    """Gather flat tensors from a group, or from a tuple of groups; the last group has neighbouring parts."""
    groups = group if isinstance(group, tuple) else (group,)
    values = input_tensor.reshape(-1)
    for each in reversed(groups):
        whole = values.new_empty(values.numel() * dist.get_world_size(each))
        dist.all_gather_into_tensor(whole, values, group=each)
        values = whole
    output_tensor.copy_(values.view_as(output_tensor))
