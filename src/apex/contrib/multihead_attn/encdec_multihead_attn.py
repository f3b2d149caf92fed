"""EncdecMultiheadAttn: a module for attention of one sequence to another."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ...ops import multihead
from ...ops._checks import check_floats
from ._module import MultiheadAttnBase
from .encdec_multihead_attn_func import encdec_attn_func


class EncdecMultiheadAttn(MultiheadAttnBase):
    """Attention of a decoder's sequence to an encoder's, with input and output projections.

    `in_proj_weight_kv` holds, for each head in turn, the rows of its keys and then of its values. `include_norm_add`
    applies a layer norm to the queries and adds the query to the result after dropout. `impl` is 'fast' (PyTorch's
    fused attention, without biases) or 'default' (step by step).
    """

    in_proj_bias_q: Parameter | None
    in_proj_bias_kv: Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        include_norm_add: bool = False,
        impl: str = "fast",
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, include_norm_add, impl)
        if bias and impl == "fast":
            raise ValueError("bias=True is not supported with impl='fast'; impl='default' has biases")
        self.in_proj_weight_q = Parameter(torch.empty(embed_dim, embed_dim))
        self.in_proj_weight_kv = Parameter(torch.empty(2 * embed_dim, embed_dim))
        self.out_proj_weight = Parameter(torch.empty(embed_dim, embed_dim))
        for name, rows in (("in_proj_bias_q", 1), ("in_proj_bias_kv", 2), ("out_proj_bias", 1)):
            self.register_parameter(name, Parameter(torch.empty(rows * embed_dim)) if bias else None)
        self._make_norm()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize each projection like a separate [embed_dim, embed_dim] matrix, and biases to zero."""
        nn.init.xavier_uniform_(self.in_proj_weight_q)
        # sqrt(6 / (1 + 1)) is sqrt(1.5) times sqrt(6 / (2 + 1))
        nn.init.xavier_uniform_(self.in_proj_weight_kv, gain=math.sqrt(1.5))
        nn.init.xavier_uniform_(self.out_proj_weight)
        self._reset_biases_and_norm()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | str | None = None,
        is_training: bool = True,
    ) -> tuple[Tensor, None]:
        """Return the attention of `query` [queries, batch, embed_dim] to `key` [keys, batch, embed_dim], and None.

        Values are projected from `key` too; `value` and `need_weights` are accepted for upstream's sake and not used.
        Where nonzero, `key_padding_mask` [batch, keys] hides a key from all queries and `attn_mask` [queries, keys]
        hides a key from one query. `attn_mask="causal"` hides the keys beyond i from query i, without a tensor.
        Dropout depends on `is_training`, not on the module's mode.
        """
        check_floats(query=query, key=key)
        mask = self._mask(key_padding_mask, attn_mask)
        dropout = self.dropout if is_training else 0.0
        weights = self.in_proj_weight_q, self.in_proj_weight_kv, self.out_proj_weight
        if self.impl == "fast":
            return self._fast_attention((query, key), weights, (), mask, dropout), None
        inputs = query if self.lyr_nrm is None else self.lyr_nrm(query), key
        biases = self.in_proj_bias_q, self.in_proj_bias_kv, self.out_proj_bias
        tensor = None if mask is None else mask.as_tensor(len(query), len(key), query.device)
        settings = attn_mask is not None, is_training, self.num_heads, self.scaling
        outputs = encdec_attn_func(*settings, *inputs, *weights, *biases, tensor, self.dropout)
        if self.include_norm_add:
            outputs = multihead.dropout_add(outputs, query, dropout)
        return outputs, None
