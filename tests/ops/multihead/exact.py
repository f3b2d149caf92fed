"""Attention with its projections by the reference: what the modules and PyTorch's fused operator are held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from apex.ops.multihead import Mask, reference


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
    context = reference.attend(queries, keys, values, heads, queries.shape[2] ** -0.5, mask)
    return _linear(context, weights[-1], biases[-1])


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = torch.einsum("sbi,oi->sbo", inputs, weight)
    return output if bias is None else output + bias


def _project(inputs: Tensor, weight: Tensor, bias: Tensor | None, heads: int, parts: int) -> tuple[Tensor, ...]:
    """The parts [length, B*H, D] that rows of `weight` [H, parts, D, E] give."""
    return _linear(inputs, weight, bias).unflatten(2, (heads, parts, -1)).flatten(1, 2).unbind(2)
