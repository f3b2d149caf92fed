"""Multihead attention in plain PyTorch operators: the definition that everything else is held against.

Runs on any device in any floating dtype, half precision in float32; differentiable to any order. Letters: S queries,
T keys, B batches, H heads, D the size of a head, E = H * D.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._library import compute_dtype
from ..softmax import reference as softmax
from .masks import Mask, broadcastable


def probabilities(queries: Tensor, keys: Tensor, heads: int, scale: float, mask: Mask | None) -> Tensor:
    """[B, H, S, T] from queries [S, B*H, D] and keys [T, B*H, D]; zeros where a query may see nothing."""
    dtype = compute_dtype(queries, keys)
    products = torch.einsum("snd,tnd->nst", queries.to(dtype), keys.to(dtype)).unflatten(0, (-1, heads))
    cover = broadcastable(mask, products.shape[-2], products.shape[-1], products.device)
    return softmax.forward(products, cover, None, scale, False, 0.0)[0]


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, heads: int, scale: float, mask: Mask | None, factor: Any = None
) -> Tensor:
    """[S, B, E]; `factor` is dropout's of each probability, [B, H, S, T]: 0, or one over the share that is kept."""
    weights = probabilities(queries, keys, heads, scale, mask)
    if factor is not None:
        weights = weights * factor
    context = torch.einsum("nst,tnd->snd", weights.flatten(0, 1), values.to(weights.dtype))
    return context.reshape(queries.shape[0], queries.shape[1] // heads, -1).to(queries.dtype)
