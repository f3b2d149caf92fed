"""Masks, inputs and weights of small attention problems."""

from __future__ import annotations

import torch
from torch import Tensor

from apex.ops.multihead import Mask, MaskKind

KINDS = ["none", "padding", "additive", "time", "causal"]


def make_mask(kind: str, queries: int, keys: int, batch: int, device: str, blind: bool = False) -> Mask | None:
    """`blind`: batch 1, or query 1, may see nothing."""
    generator = torch.Generator().manual_seed(queries * 31 + keys)
    shape = (queries, keys) if kind == "time" else (batch, keys)
    hidden = torch.rand(shape, generator=generator) > 0.6
    if keys:
        hidden[:, 0] = False
    if blind:
        hidden[1] = True
    if kind == "padding":
        return Mask(MaskKind.PADDING, hidden.byte().to(device))
    if kind == "additive":
        added = torch.randn(shape, generator=generator).masked_fill(hidden, -torch.inf)
        return Mask(MaskKind.ADDITIVE, added.to(device))
    if kind == "time":
        return Mask(MaskKind.TIME, hidden.to(device))
    return Mask(MaskKind.CAUSAL) if kind == "causal" else None


def on_cpu(mask: Mask | None) -> Mask | None:
    if mask is None or mask.tensor is None:
        return mask
    tensor = mask.tensor.cpu()
    return Mask(mask.kind, tensor.double() if tensor.is_floating_point() else tensor)


def leaves(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str, spread: float = 1.0) -> list[Tensor]:
    return [(torch.randn(s, device=device) * spread).to(dtype).requires_grad_() for s in shapes]


def doubles(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().cpu().double().requires_grad_() for tensor in tensors]
