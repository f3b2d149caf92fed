"""Multihead attention through `F.scaled_dot_product_attention`, on views of the packed projections.

Letters: S queries, T keys, B batches, H heads, D the size of a head, E = H * D. The projections of a head lie beside
each other: a row of the packed queries, keys and values is [B, H, 3, D], of packed keys and values [B, H, 2, D].
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..norm import layer_norm
from .checks import check_encdec, check_self
from .dropout_add import dropout_add
from .masks import Mask, MaskKind, added_logits, check_mask

# Every batch's heads count as heads of one batch up to here: the second and third dimension of a CUDA grid end there.
MOST_HEADS = 65535
NORM_EPS = 1e-5


def attend(queries: Tensor, keys: Tensor, values: Tensor, heads: int, mask: Mask | None, dropout: float) -> Tensor:
    """[S, B, E] from queries [S, B*H, D], keys and values [T, B*H, D]; a query that may see nothing gets zeros.

    As one batch of B * H heads the result comes out as [S, B*H, D]: as B batches of H heads it would be [B, S, H, D],
    and turning it (and its gradient) round would be a copy of its own.
    """
    length, batch_heads, size = queries.shape
    batch = batch_heads // heads
    check_mask(mask, length, keys.shape[0], batch, queries.device)
    added = added_logits(mask, batch, heads, queries.dtype)
    causal = mask is not None and mask.kind is MaskKind.CAUSAL
    parts = [part.transpose(0, 1).unsqueeze(0) for part in (queries, keys, values)]
    if batch_heads > MOST_HEADS:
        parts = [part.unflatten(1, (batch, heads)).squeeze(0) for part in parts]
        if added is not None and added.dim() == 4:
            added = added.unflatten(1, (batch, heads)).squeeze(0)
    context = F.scaled_dot_product_attention(*parts, attn_mask=added, dropout_p=dropout, is_causal=causal)
    if batch_heads > MOST_HEADS:
        context = context.flatten(0, 1).unsqueeze(0)
    return context.squeeze(0).transpose(0, 1).reshape(length, batch, heads * size)


def self_attention(
    inputs: Tensor,
    input_weights: Tensor,
    output_weights: Tensor,
    input_biases: Tensor | None = None,
    output_biases: Tensor | None = None,
    *,
    heads: int,
    mask: Mask | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of `inputs` [S, B, E] to itself; `input_weights` are [H * 3 * D, E]."""
    check_self(inputs, input_weights, output_weights, heads, dropout)
    length, batch, width = inputs.shape
    packed = F.linear(inputs, input_weights, input_biases)
    parts = packed.reshape(length, batch * heads, 3, width // heads).unbind(2)
    return F.linear(attend(*parts, heads, mask, dropout), output_weights, output_biases)


def encdec_attention(
    inputs_q: Tensor,
    inputs_kv: Tensor,
    input_weights_q: Tensor,
    input_weights_kv: Tensor,
    output_weights: Tensor,
    *,
    heads: int,
    mask: Mask | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of `inputs_q` [S, B, E] to `inputs_kv` [T, B, E]; `input_weights_kv` are [H * 2 * D, E]."""
    check_encdec(inputs_q, inputs_kv, input_weights_q, input_weights_kv, output_weights, heads, dropout)
    length, batch, width = inputs_q.shape
    size = width // heads
    queries = F.linear(inputs_q, input_weights_q).reshape(length, batch * heads, size)
    keys, values = F.linear(inputs_kv, input_weights_kv).reshape(-1, batch * heads, 2, size).unbind(2)
    return F.linear(attend(queries, keys, values, heads, mask, dropout), output_weights)


def self_attention_norm_add(
    inputs: Tensor,
    gamma: Tensor,
    beta: Tensor,
    input_weights: Tensor,
    output_weights: Tensor,
    input_biases: Tensor | None = None,
    output_biases: Tensor | None = None,
    *,
    heads: int,
    mask: Mask | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`inputs` plus the dropped-out self attention of their layer norm."""
    check_self(inputs, input_weights, output_weights, heads, dropout)
    normed = layer_norm(inputs, (inputs.shape[2],), gamma, beta, NORM_EPS)
    outputs = self_attention(
        normed, input_weights, output_weights, input_biases, output_biases, heads=heads, mask=mask, dropout=dropout
    )
    return dropout_add(outputs, inputs, dropout)


def encdec_attention_norm_add(
    inputs_q: Tensor,
    inputs_kv: Tensor,
    gamma: Tensor,
    beta: Tensor,
    input_weights_q: Tensor,
    input_weights_kv: Tensor,
    output_weights: Tensor,
    *,
    heads: int,
    mask: Mask | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`inputs_q` plus the dropped-out attention of their layer norm to `inputs_kv`."""
    check_encdec(inputs_q, inputs_kv, input_weights_q, input_weights_kv, output_weights, heads, dropout)
    normed = layer_norm(inputs_q, (inputs_q.shape[2],), gamma, beta, NORM_EPS)
    outputs = encdec_attention(
        normed, inputs_kv, input_weights_q, input_weights_kv, output_weights, heads=heads, mask=mask, dropout=dropout
    )
    return dropout_add(outputs, inputs_q, dropout)
