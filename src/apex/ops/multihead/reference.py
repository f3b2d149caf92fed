"""Multihead attention in plain PyTorch operators: the definition that other implementations are tested against.

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
    """Return [B, H, S, T] from queries [S, B*H, D] and keys [T, B*H, D]; zeros for a query that sees nothing."""
    dtype = compute_dtype(queries, keys)
    products = torch.einsum("snd,tnd->nst", queries.to(dtype), keys.to(dtype)).unflatten(0, (-1, heads))
    cover = broadcastable(mask, products.shape[-2], products.shape[-1], products.device)
    return softmax.forward(products, cover, None, scale, False, 0.0)[0]


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, heads: int, scale: float, mask: Mask | None, factor: Any = None
) -> Tensor:
    """Return [S, B, E]; `factor`, [B, H, S, T], is dropout's factor of each probability: 0, or 1 / the kept share."""
    weights = probabilities(queries, keys, heads, scale, mask)
    if factor is not None:
        weights = weights * factor
    context = torch.einsum("nst,tnd->snd", weights.flatten(0, 1), values.to(weights.dtype))
    return context.reshape(queries.shape[0], queries.shape[1] // heads, -1).to(queries.dtype)
