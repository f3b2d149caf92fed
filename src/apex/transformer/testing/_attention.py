"""Attention of the standalone models; `standalone_transformer_lm` explains the letters of shapes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.attention import varlen_attention
from ...ops.rope import rotary_embedding_pair
from .. import parallel_state, tensor_parallel
from ..context_parallel import context_attention
from ..context_parallel._parts import size_and_rank
from ..enums import AttnMaskType
from ..functional import scaled_masked_softmax, scaled_upper_triang_masked_softmax
from ..packed_seq_params import PackedSeqParams
from ..tensor_parallel.random import own_random_numbers
from ..utils import divide
from ._config import TransformerConfig
from ._layers import dropout, init_method_normal, scaled_init_method_normal


class CoreAttention(nn.Module):
    """Attention without its linear layers."""

    def __init__(self, config: TransformerConfig, attn_mask_type: AttnMaskType) -> None:
        super().__init__()
        self.config, self.causal = config, attn_mask_type == AttnMaskType.causal
        self.cp_comm_type = config.cp_comm_type  # a plugin of the Booster may set another one
        self.splits_context = size_and_rank(None)[0] > 1
        if self.splits_context and config.attention_dropout > 0.0:
            raise ValueError(
                f"attention_dropout={config.attention_dropout} must be 0 with context parallelism: a rank never has "
                "all probabilities of a query"
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Map query [s, b, n, d], and key and value, which may have fewer heads, to [s, b, n * d].

        The mask [1 or b, 1, s, s] is True for hidden keys. If a mask is given, causal attention uses only the mask,
        which must hide later keys; without a mask it is faster. Packed documents and context parallelism take none.
        """
        if packed_seq_params is not None or self.splits_context:
            if attention_mask is not None:
                raise ValueError("attention_mask must be None with packed_seq_params or context parallelism")
            return self._split_or_packed(query, key, value, packed_seq_params).flatten(2)
        if attention_mask is not None and attention_mask.dim() != 4:
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)}, expected [1 or batch, 1, words, words], True "
                "for hidden keys"
            )
        key, value = (_repeated(tensor, query.shape[2]) for tensor in (key, value))
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        causal = self.causal and attention_mask is None
        probability = self.config.attention_dropout if self.training else 0.0
        if self.config.attention == "sdpa":
            mask = None if attention_mask is None else attention_mask.logical_not()
            with own_random_numbers(probability > 0.0):
                mixed = F.scaled_dot_product_attention(query, key, value, mask, probability, is_causal=causal)
        else:
            scores, scale = query @ key.transpose(-1, -2), self.config.head_size**-0.5
            if causal:
                weights = scaled_upper_triang_masked_softmax(scores, None, scale)
            else:
                weights = scaled_masked_softmax(scores, attention_mask, scale)
            mixed = dropout(weights, probability, self.training, own=True) @ value
        return mixed.permute(2, 0, 1, 3).flatten(2)

    def _split_or_packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams | None) -> Tensor:
        """Return attention [s, b, n, d] of packed documents, of this rank's part of sequences, or of both."""
        if packed is None:
            return context_attention(query, key, value, causal=self.causal, comm=self.cp_comm_type)
        if query.shape[1] != 1:
            raise ValueError(f"packed documents are one row of words, [1, s]; the batch has {query.shape[1]}")
        bounds, longest = packed.bounds()
        query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
        if self.splits_context:
            options: Any = {"comm": self.cp_comm_type, "cu_seqlens": bounds, "max_seqlen": longest}
            return context_attention(query, key, value, causal=self.causal, **options).unsqueeze(1)
        probability = self.config.attention_dropout if self.training else 0.0
        with own_random_numbers(probability > 0.0):
            mixed: Any = varlen_attention(query, key, value, bounds, longest, causal=self.causal, dropout_p=probability)
        return mixed.unsqueeze(1)


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    """Return keys or values [s, b, heads of keys, d] with each head repeated for the heads of queries that share it."""
    return tensor if tensor.shape[2] == heads else tensor.repeat_interleave(heads // tensor.shape[2], 2)


class ParallelAttention(nn.Module):
    """Self-attention whose heads are split over the ranks."""

    def __init__(self, config: TransformerConfig, attn_mask_type: AttnMaskType, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        self.heads = divide(
            config.num_attention_heads,
            parallel_state.get_tensor_model_parallel_world_size(),
            "num_attention_heads over the tensor-parallel ranks",
        )
        self.key_heads = divide(
            config.key_heads,
            parallel_state.get_tensor_model_parallel_world_size(),
            "num_query_groups over the tensor-parallel ranks",
        )
        width = config.num_attention_heads * config.head_size
        self.query_key_value = tensor_parallel.ColumnParallelLinear(
            config.hidden_size,
            width + 2 * config.key_heads * config.head_size,
            init_method=init_method_normal(config.init_method_std, generator),
            **config.column(),
        )
        self.core_attention = CoreAttention(config, attn_mask_type)
        self.dense = tensor_parallel.RowParallelLinear(
            width,
            config.hidden_size,
            input_is_parallel=True,
            init_method=scaled_init_method_normal(config.init_method_std, config.num_layers, generator),
            **config.row(),
        )

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Map [s, b, h] to the same shape."""
        mixed = self.query_key_value(x)[0]
        # Rows of the weight are ordered by head of keys, then its queries, key and value: ranks hold whole heads.
        size, shared = self.config.head_size, self.heads // self.key_heads
        mixed = mixed.view(*mixed.shape[:2], self.key_heads, (shared + 2) * size)
        query, key, value = mixed.split((shared * size, size, size), -1)
        if shared > 1:
            query = query.reshape(*query.shape[:2], self.heads, size)
        if rotary is not None:
            query, key = rotary_embedding_pair(query, key, rotary)
        arguments = (query, key, value, attention_mask, packed_seq_params)
        if self.config.recompute == "selective" and torch.is_grad_enabled():
            mixed = tensor_parallel.checkpoint(self.core_attention, False, *arguments)
        else:
            mixed = self.core_attention(*arguments)
        return self.dense(mixed)[0]
