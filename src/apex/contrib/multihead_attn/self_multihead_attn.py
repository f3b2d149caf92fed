"""SelfMultiheadAttn: a module for self attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ...ops import multihead
from ...ops._checks import check_floats
from ._module import MultiheadAttnBase
from .self_multihead_attn_func import self_attn_func


class SelfMultiheadAttn(MultiheadAttnBase):
    """Attention of a sequence to itself, with input and output projections.

    `in_proj_weight` holds, for each head in turn, the rows of its queries, keys and values; `separate_qkv_params` keeps
    them as `q_weight`, `k_weight` and `v_weight`. `include_norm_add` applies a layer norm in front and adds the input
    to the result after dropout. If `mask_additive`, the `key_padding_mask` is added to the logits. `impl` is 'fast'
    (PyTorch's fused attention) or 'default' (step by step).
    """

    in_proj_weight: Parameter
    in_proj_bias: Parameter | None
    q_weight: Parameter
    k_weight: Parameter
    v_weight: Parameter
    q_bias: Parameter
    k_bias: Parameter
    v_bias: Parameter

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        include_norm_add: bool = False,
        impl: str = "fast",
        separate_qkv_params: bool = False,
        mask_additive: bool = False,
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, include_norm_add, impl)
        if mask_additive and include_norm_add:
            raise ValueError("mask_additive=True is not supported with include_norm_add=True")
        if mask_additive and impl == "fast" and not bias:
            raise ValueError("mask_additive=True needs bias=True with impl='fast'; impl='default' takes it without")
        self.separate_qkv_params = separate_qkv_params
        self.mask_additive = mask_additive
        names, rows = (("q", "k", "v"), embed_dim) if separate_qkv_params else (("in_proj",), 3 * embed_dim)
        for name in names:
            self.register_parameter(f"{name}_weight", Parameter(torch.empty(rows, embed_dim)))
        self.out_proj_weight = Parameter(torch.empty(embed_dim, embed_dim))
        for name in names:
            self.register_parameter(f"{name}_bias", Parameter(torch.empty(rows)) if bias else None)
        self.register_parameter("out_proj_bias", Parameter(torch.empty(embed_dim)) if bias else None)
        self._make_norm()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize each projection like a separate [embed_dim, embed_dim] matrix, and biases to zero."""
        if self.separate_qkv_params:
            for weight in (self.q_weight, self.k_weight, self.v_weight):
                nn.init.xavier_uniform_(weight)
        else:
            # sqrt(6 / (1 + 1)) is sqrt(2) times sqrt(6 / (3 + 1))
            nn.init.xavier_uniform_(self.in_proj_weight, gain=math.sqrt(2))
        nn.init.xavier_uniform_(self.out_proj_weight)
        self._reset_biases_and_norm()

    def _input_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [heads * 3 * head_dim, embed_dim] and the bias of the packed input projection."""
        if not self.separate_qkv_params:
            return self.in_proj_weight, self.in_proj_bias
        by_head = (self.num_heads, self.head_dim, self.embed_dim)
        weights = [weight.view(by_head) for weight in (self.q_weight, self.k_weight, self.v_weight)]
        weight = torch.stack(weights, dim=1).view(3 * self.embed_dim, self.embed_dim)
        if not self.bias:
            return weight, None
        biases = [bias.view(by_head[:2]) for bias in (self.q_bias, self.k_bias, self.v_bias)]
        return weight, torch.stack(biases, dim=1).view(3 * self.embed_dim)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | str | None = None,
        is_training: bool = True,
    ) -> tuple[Tensor, None]:
        """Return the self attention of `query` [length, batch, embed_dim], and None.

        `key`, `value` and `need_weights` are accepted for upstream's sake and not used. Where nonzero,
        `key_padding_mask` [batch, length] hides a key from all queries and `attn_mask` [length, length] hides a key
        from one query. `attn_mask="causal"` hides the keys beyond i from query i, without a tensor. Dropout depends on
        `is_training`, not on the module's mode.
        """
        check_floats(query=query)
        if query.dim() != 3:
            raise ValueError(f"query has shape {list(query.shape)}, expected [length, batch, embed_dim]")
        mask = self._mask(key_padding_mask, attn_mask, self.mask_additive)
        dropout = self.dropout if is_training else 0.0
        weight, bias = self._input_parameters()
        weights, biases = (weight, self.out_proj_weight), (bias, self.out_proj_bias)
        if self.impl == "fast":
            return self._fast_attention((query,), weights, biases, mask, dropout), None
        inputs = query if self.lyr_nrm is None else self.lyr_nrm(query)
        tensor = None if mask is None else mask.as_tensor(len(query), len(query), query.device)
        settings = attn_mask is not None, is_training, self.num_heads, self.scaling
        outputs = self_attn_func(*settings, inputs, *weights, *biases, tensor, self.mask_additive, self.dropout)
        if self.include_norm_add:
            outputs = multihead.dropout_add(outputs, query, dropout)
        return outputs, None
