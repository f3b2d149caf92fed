"""The norm of gradients that may be sharded over processes (FSDP2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._failures import explained
from ..ops._host import HOST

_HALF = (torch.float16, torch.bfloat16)


@torch.no_grad()
def total_norm(gradients: Sequence[Tensor], order: float) -> Tensor:
    """Return the norm of all gradients; if some are DTensors, all processes of their mesh must call it.

    The norm of a DTensor's local part is computed on its own device and reduced on the mesh's device, because processes
    with gradients in the host's memory (FSDP2 with offload) may be connected by NCCL only.
    """
    by_layout: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        if type(gradient) is Tensor or not hasattr(gradient, "placements"):  # hasattr of a plain tensor is slow
            by_layout.setdefault(None, []).append(gradient)
        else:
            sharded: Any = gradient
            layout = sharded.device_mesh, sharded.placements
            by_layout.setdefault(layout, []).append(sharded._local_tensor)
    return _joined([_norm(tensors, order, layout) for layout, tensors in by_layout.items()], order)


def _norm(tensors: list[Tensor], order: float, layout: Any) -> Tensor:
    """Return the norm of tensors of one layout: None, or the mesh and the placements of DTensors."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    norms: list[Tensor] = []
    for (_, dtype), group in groups.items():
        # The norm of scaled gradients overflows float16 long before the gradients do.
        norms += torch._foreach_norm(group, order, dtype=torch.float32 if dtype in _HALF else None)
    local = _joined(norms, order)
    if layout is None:
        return local
    mesh, placements = layout
    # By the dtypes of all tensors, because a process whose shards are empty must send the same dtype.
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    total = local.to(mesh.device_type, torch.float64 if wide else torch.float32)
    total = total if order == torch.inf else total**order
    operation = dist.ReduceOp.MAX if order == torch.inf else dist.ReduceOp.SUM
    for dimension, placement in enumerate(placements):
        if not placement.is_replicate():
            with explained("measuring the norm of all gradients"):
                dist.all_reduce(total, operation, group=mesh.get_group(dimension))
    return total if order == torch.inf else total ** (1 / order)


def _joined(norms: list[Tensor], order: float) -> Tensor:
    """Return the total norm of tensors from the norm of each, on the device of the first."""
    if len(norms) < 2:
        return norms[0] if norms else torch.zeros((), dtype=torch.float32, device=HOST)
    first = norms[0]
    if any(norm.device != first.device or norm.dtype != first.dtype for norm in norms):
        norms = [norm.to(first.device, torch.float32) for norm in norms]
    return torch.linalg.vector_norm(torch.stack(norms), order)
