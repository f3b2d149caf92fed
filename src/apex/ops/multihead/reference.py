"""Multihead attention in plain PyTorch operators: the definition that everything else is held against.

Runs on any device in any floating dtype, half precision in float32; differentiable to any order. Letters: S queries,
T keys, B batches, H heads, D the size of a head, E = H * D.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .masks import Mask, broadcastable


def wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def probabilities(queries: Tensor, keys: Tensor, heads: int, scale: float, mask: Mask | None) -> Tensor:
    """[B, H, S, T] from queries [S, B*H, D] and keys [T, B*H, D]; zeros where a query may see nothing."""
    logits = scale * torch.einsum("snd,tnd->nst", wide(queries), wide(keys))
    logits = logits.unflatten(0, (-1, heads))
    cover = broadcastable(mask, logits.shape[-2], logits.shape[-1], logits.device)
    if cover is not None:
        logits = logits + cover if cover.is_floating_point() else logits.masked_fill(cover, -torch.inf)
    blind = (logits == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(logits.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, heads: int, scale: float, mask: Mask | None, factor: Any = None
) -> Tensor:
    """[S, B, E]; `factor` is dropout's of each probability, [B, H, S, T]: 0, or one over the share that is kept."""
    weights = probabilities(queries, keys, heads, scale, mask)
    if factor is not None:
        weights = weights * factor
    context = torch.einsum("nst,tnd->snd", weights.flatten(0, 1), wide(values))
    return context.reshape(queries.shape[0], queries.shape[1] // heads, -1).to(queries.dtype)
