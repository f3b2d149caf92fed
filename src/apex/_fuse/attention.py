"""The rule for `nn.MultiheadAttention`: attention on views of the packed projections.

PyTorch copies query, key and value out of the packed tensor and, in the backward pass, fills and adds three tensors of
the packed size. Letters: S queries, T keys, B batches, H heads, D the size of a head, E = H * D.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ops.multihead import dot_product_attention
from .rule import FusionRule, unless_overridden


def _reason(module: Any) -> str:
    if not module._qkv_same_embed_dim:
        return "keys or values have another size than queries"
    if module.bias_k is not None or module.add_zero_attn:
        return "it adds a key and a value of its own"
    return ""


def _additive(mask: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """Return a mask that is added to the logits; True of a boolean mask becomes minus infinity."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -math.inf)
    return mask.to(dtype).reshape(shape)


def _is_supported(module: Any, query: Tensor, key: Tensor, value: Tensor, masks: tuple[Any, Any], causal: bool) -> bool:
    """Return whether a call is batched, has one tensor as key and value, and masks of the usual shapes."""
    if key is not value or query.dim() != 3 or key.dim() != 3 or query.is_nested or key.is_nested:
        return False
    padding, others = masks
    batch, queries, keys = query.shape[1 - module.batch_first], *(t.shape[module.batch_first] for t in (query, key))
    shapes = ((queries, keys), (batch * module.num_heads, queries, keys))
    return (
        key.shape[1 - module.batch_first] == batch
        and (others is None or others.shape in shapes)
        and (padding is None or padding.shape == (batch, keys))
        and not (causal and others is None)  # PyTorch raises an error
        and all(mask is None or mask.dtype == torch.bool or mask.is_floating_point() for mask in masks)
    )


def attention_forward(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute nn.MultiheadAttention; call PyTorch's forward if weights are requested or gradients are disabled."""
    is_training, masks = self.training or torch.is_grad_enabled(), (key_padding_mask, attn_mask)
    if need_weights or not is_training or not _is_supported(self, query, key, value, masks, is_causal):
        options = {"key_padding_mask": key_padding_mask, "need_weights": need_weights, "attn_mask": attn_mask}
        options |= {"average_attn_weights": average_attn_weights, "is_causal": is_causal}
        return self.fused_from.forward(self, query, key, value, **options)
    heads, width = self.num_heads, self.embed_dim
    if query is key:
        packed = functional.linear(query, self.in_proj_weight, self.in_proj_bias)
        parts = packed.unflatten(-1, (3, heads, -1)).unbind(2)
    else:
        weights = self.in_proj_weight.split([width, 2 * width])
        biases = (None, None) if self.in_proj_bias is None else self.in_proj_bias.split([width, 2 * width])
        packed = functional.linear(key, weights[1], biases[1])
        parts = (
            functional.linear(query, weights[0], biases[0]).unflatten(-1, (heads, -1)),
            *(packed.unflatten(-1, (2, heads, -1)).unbind(2)),
        )
    order = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)  # to [B, H, S or T, D]
    q, k, v = (part.permute(order) for part in parts)
    batch, _, queries, _ = q.shape
    keys, dtype = k.shape[2], q.dtype
    causal = is_causal and key_padding_mask is None
    mask = None
    if not causal:
        shape = (1, 1, queries, keys) if attn_mask is None or attn_mask.dim() == 2 else (batch, heads, queries, keys)
        mask = _additive(attn_mask, shape, dtype)
        padding = _additive(key_padding_mask, (batch, 1, 1, keys), dtype)
        mask = padding if mask is None else mask if padding is None else mask + padding
    context = dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0, causal)
    context = context.transpose(1, 2) if self.batch_first else context.permute(2, 0, 1, 3)
    return functional.linear(context.flatten(2), self.out_proj.weight, self.out_proj.bias), None


RULES = [
    FusionRule(
        "attention without weights",
        lambda module: isinstance(module, nn.MultiheadAttention),
        unless_overridden(nn.MultiheadAttention, _reason),
        lambda original: attention_forward,
    )
]
