"""Multihead attention step by step, with every intermediate result that upstream's functions compute and return.

Letters: S queries, T keys, B batches, H heads, D the size of a head, E = H * D. Nothing here is recorded by autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import softmax
from .checks import check_attention
from .masks import Mask, broadcastable, check_mask


class Core(NamedTuple):
    """Results of attention proper, each [B*H, S, T] except the context [S, B*H, D].

    `dropped` are the probabilities after dropout; `noise` is the random state that `apex.ops.softmax` drew for it, or
    None.
    """

    logits: Tensor
    probabilities: Tensor
    dropped: Tensor
    noise: Tensor | None
    context: Tensor


def kept_bytes(noise: Tensor | None, probabilities: Tensor, dropout: float) -> Tensor:
    """Return upstream's dropout mask, [B*H, S, T]: bytes, 1 for kept elements; empty if nothing was drawn."""
    if noise is None:
        return probabilities.new_empty((0, *probabilities.shape[1:]), dtype=torch.uint8)
    spec = softmax.SoftmaxSpec(dropout=dropout)
    return softmax.keep_mask(noise, probabilities, spec).view(probabilities.shape)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, heads: int, scale: float, mask: Mask | None, dropout: float
) -> Core:
    """Compute attention of queries [S, B*H, D] to keys and values [T, B*H, D]."""
    length, batch_heads, _ = queries.shape
    check_mask(mask, length, keys.shape[0], batch_heads // heads, queries.device)
    logits = queries.new_empty((batch_heads, length, keys.shape[0]))
    _multiply_into(logits, queries.transpose(0, 1), keys.permute(1, 2, 0), scale)
    dropped, probabilities, noise = masked_softmax(logits, heads, mask, dropout)
    context = queries.new_empty(queries.shape)
    _multiply_into(context.transpose(0, 1), dropped, values.transpose(0, 1))
    return Core(logits, probabilities, dropped, noise, context)


def masked_softmax(
    logits: Tensor, heads: int, mask: Mask | None, dropout: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the probabilities of logits [B*H, S, T] after dropout and before it, and the noise drawn for it."""
    batch_heads, queries, keys = logits.shape
    spec = softmax.SoftmaxSpec(dropout=dropout)
    by_batch = logits.reshape(batch_heads // heads, heads, queries, keys)
    noise = softmax.draw_noise(by_batch, spec)
    cover = broadcastable(mask, queries, keys, logits.device)
    dropped, probabilities = softmax.softmax_forward(by_batch, cover, spec, noise)
    return dropped.view(logits.shape), probabilities.view(logits.shape), noise


def attend_backward(
    gradient: Tensor, parts: Sequence[Tensor], core: Sequence[Any], scale: float, dropout: float, into: Sequence[Tensor]
) -> None:
    """Fill `into` with the gradients of `parts` (queries, keys and values), given the gradient of the context.

    `core` are probabilities, dropped and noise, or the bytes of `kept_bytes` in place of the noise.
    """
    (queries, keys, values), (probabilities, dropped, noise) = parts, core
    gradient = gradient.reshape(queries.shape).transpose(0, 1)
    d_queries, d_keys, d_values = (part.transpose(0, 1) for part in into)
    _multiply_into(d_values, dropped.transpose(1, 2), gradient)
    d_dropped = torch.bmm(gradient, values.permute(1, 2, 0))
    d_logits = softmax_backward(d_dropped, probabilities, dropout, noise)
    _multiply_into(d_queries, d_logits, keys.transpose(0, 1), scale)
    _multiply_into(d_keys, d_logits.transpose(1, 2), queries.transpose(0, 1), scale)


def softmax_backward(gradient: Tensor, probabilities: Tensor, dropout: float, noise: Tensor | None) -> Tensor:
    """Return the gradient of the logits; `noise` is the forward pass's noise, or bytes from `kept_bytes`."""
    if noise is None or not noise.numel():
        noise, dropout = None, 0.0
    elif noise.dtype != torch.int64:
        noise = noise.reshape(probabilities.shape)
    spec = softmax.SoftmaxSpec(dropout=dropout)
    return softmax.softmax_backward(gradient, probabilities, spec, noise)


def _multiply_into(result: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """Compute result = scale * left @ right, matrix by matrix, directly into a strided result, without a copy."""
    if torch.compiler.is_compiling():  # Inductor takes no strided `out`
        result.copy_(torch.bmm(left, right) * scale)
    else:
        torch.baddbmm(result, left, right, beta=0, alpha=scale, out=result)


def linear_backward(
    gradient: Tensor, inputs: Tensor, weights: Tensor, biases: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of inputs, weights and, if there are any, biases."""
    rows = gradient.reshape(-1, weights.shape[0])
    d_inputs = torch.mm(rows, weights).view(inputs.shape)
    d_weights = torch.mm(rows.t(), inputs.reshape(-1, weights.shape[1]))
    return d_inputs, d_weights, rows.sum(0) if biases else None


def forward(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Any], *, mask: Mask | None, **settings: Any
) -> tuple[Tensor, list[Tensor], Core]:
    """Return outputs, the packed projections of each input, and the results of attention proper.

    The projections are [S, B, 3E], or [S, B, E] and [T, B, 2E]. One input attends to itself, or the first to the
    second. `weights` and `biases`, which may be None, are given for each input, then for the outputs; `settings` are
    heads, scale and dropout.
    """
    heads, scale, dropout = settings["heads"], settings["scale"], settings["dropout"]
    check_attention(inputs, weights, heads, dropout)
    packed = [F.linear(*each).contiguous() for each in zip(inputs, weights[:-1], biases[:-1], strict=True)]
    queries, keys, values = split(packed, heads)
    core = attend(queries, keys, values, heads, scale, mask, dropout)
    return F.linear(core.context.view(inputs[0].shape), weights[-1], biases[-1]), packed, core


def backward(
    gradient: Tensor,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    packed: Sequence[Tensor],
    core: Sequence[Any],
    settings: Sequence[Any],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of inputs, weights and biases, None for biases that do not exist.

    `core` are context, probabilities, dropped and noise; `settings` heads, scale, dropout and whether there are biases.
    """
    heads, scale, dropout, biases = settings
    d_context, d_output_weights, d_output_biases = linear_backward(gradient, core[0], weights[-1], biases)
    d_packed = [torch.empty_like(each) for each in packed]
    attend_backward(d_context, split(packed, heads), core[1:], scale, dropout, split(d_packed, heads))
    gradients = [linear_backward(*each, biases) for each in zip(d_packed, inputs, weights[:-1], strict=True)]
    d_inputs, d_weights, d_biases = zip(*gradients, strict=True)
    return *d_inputs, *d_weights, d_output_weights, *d_biases, d_output_biases


def split(packed: Sequence[Tensor], heads: int) -> list[Tensor]:
    """Return queries, keys and values as views [length, B*H, D]; the parts of one head are adjacent in `packed`.

    They are split along their own dimension, so that autograd combines their gradients in one pass.
    """
    views: list[Tensor] = []
    for each, parts in zip(packed, (3,) if len(packed) == 1 else (1, 2), strict=True):
        length, batch, width = each.shape
        views += each.reshape(length, batch * heads, parts, width // (parts * heads)).unbind(2)
    return views
