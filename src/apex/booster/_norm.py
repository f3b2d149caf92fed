"""The norm of gradients that may be sharded over processes (FSDP2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._failures import explained
from ..amp._amp_state import HALF


@torch.no_grad()
def total_norm(gradients: Sequence[Tensor], order: float) -> Tensor:
    """Return the norm of all gradients; if some are DTensors, all processes of their mesh call it.

    The parts of a DTensor are measured where they are, and their norms are added up on the mesh's device: gradients in
    the host's memory (FSDP2 with offload) belong to processes that may be connected by NCCL alone.
    """
    by_layout: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        layout = (gradient.device_mesh, gradient.placements) if hasattr(gradient, "placements") else None
        by_layout.setdefault(layout, []).append(getattr(gradient, "_local_tensor", gradient))
    norms = [_norm(tensors, order, layout) for layout, tensors in by_layout.items()]
    if not norms:
        return torch.zeros((), dtype=torch.float32)
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms]), order)


def _norm(tensors: list[Tensor], order: float, layout: Any) -> Tensor:
    """Return the norm of tensors of one layout: None, or the mesh and the placements of DTensors."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if any(tensor.dtype in HALF for tensor in tensors):
        # The norm of scaled gradients is too large for float16 long before they are.
        norms = [torch.linalg.vector_norm(tensor, order, dtype=torch.float32) for tensor in tensors]
        local = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), order)
    else:
        local = torch.nn.utils.get_total_norm(tensors, order)
    if layout is None:
        return local
    mesh, placements = layout
    total = local.to(mesh.device_type, torch.float32)
    total = total if order == torch.inf else total**order
    operation = dist.ReduceOp.MAX if order == torch.inf else dist.ReduceOp.SUM
    for dimension, placement in enumerate(placements):
        if not placement.is_replicate():
            with explained("measuring the norm of all gradients"):
                dist.all_reduce(total, operation, group=mesh.get_group(dimension))
    return total if order == torch.inf else total ** (1 / order)
