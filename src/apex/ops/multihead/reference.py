"""Multihead attention in plain PyTorch operators: the definition that everything else is held against.

Runs on any device in any floating dtype, half precision in float32; differentiable to any order. Letters: S queries,
T keys, B batches, H heads, D the size of a head, E = H * D.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def attention(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Any], heads: int, mask: Mask | None = None
) -> Tensor:
    """Of one input to itself, or of the first input to the second.

    `weights` and `biases`, which may be None, are those of each input and of the outputs. Rows of a weight belong, head
    after head, to its queries, keys and values, as far as it has them: [H, 3, D, E]; [H, 1, D, E] and [H, 2, D, E].
    """
    counts = (3,) if len(inputs) == 1 else (1, 2)
    given = zip(inputs, weights[:-1], biases[:-1], counts, strict=True)
    queries, keys, values = (part for x, w, b, count in given for part in _project(x, w, b, heads, count))
    context = attend(queries, keys, values, heads, queries.shape[2] ** -0.5, mask)
    return _linear(context, weights[-1], biases[-1])


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = torch.einsum("sbi,oi->sbo", inputs, weight)
    return output if bias is None else output + bias


def _project(inputs: Tensor, weight: Tensor, bias: Tensor | None, heads: int, parts: int) -> tuple[Tensor, ...]:
    """The parts [length, B*H, D] that rows of `weight` [H, parts, D, E] give."""
    return _linear(inputs, weight, bias).unflatten(2, (heads, parts, -1)).flatten(1, 2).unbind(2)
