"""Base class of both attention modules: settings, the layer norm in front and the choice of a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ...normalization import FusedLayerNorm
from ...ops import multihead
from ...ops._checks import check_optional_tensors, check_tensors

IMPLEMENTATIONS = ("fast", "default")
CAUSAL = "causal"


class MultiheadAttnBase(nn.Module):
    """Settings by upstream's names and the layer norm's parameters; subclasses add all other parameters."""

    lyr_nrm_gamma_weights: Parameter
    lyr_nrm_beta_weights: Parameter
    lyr_nrm: FusedLayerNorm | None
    out_proj_bias: Parameter | None

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float, bias: bool, include_norm_add: bool, impl: str
    ) -> None:
        super().__init__()
        multihead.check_heads(embed_dim, num_heads)
        multihead.check_dropout(dropout)
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl={impl!r} is not known; use 'fast' or 'default'")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.head_dim = embed_dim // num_heads
        self.bias = bias
        self.include_norm_add = include_norm_add
        self.impl = impl
        self.scaling = self.head_dim**-0.5

    def _make_norm(self) -> None:
        """Create the layer norm in front: as parameters of this module if `impl` is 'fast', else as a submodule."""
        has_parameters = self.include_norm_add and self.impl == "fast"
        for name in ("lyr_nrm_gamma_weights", "lyr_nrm_beta_weights"):
            self.register_parameter(name, Parameter(torch.empty(self.embed_dim)) if has_parameters else None)
        self.lyr_nrm = FusedLayerNorm(self.embed_dim) if self.include_norm_add and not has_parameters else None

    def _reset_biases_and_norm(self) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            if "_bias" in name:
                nn.init.zeros_(parameter)
        if self.lyr_nrm is not None:
            self.lyr_nrm.reset_parameters()
        elif self.include_norm_add:
            nn.init.ones_(self.lyr_nrm_gamma_weights)
            nn.init.zeros_(self.lyr_nrm_beta_weights)

    def _fast_attention(
        self, inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None], *options: Any
    ) -> Tensor:
        mask, dropout = options
        norm = (self.lyr_nrm_gamma_weights, self.lyr_nrm_beta_weights) if self.include_norm_add else ()
        return multihead.attention(inputs, weights, biases, heads=self.num_heads, mask=mask, dropout=dropout, norm=norm)

    def _mask(
        self, key_padding_mask: Tensor | None, attn_mask: Tensor | str | None, additive: bool = False
    ) -> multihead.Mask | None:
        """Return the mask of a call made from its two mask arguments, or None."""
        check_optional_tensors(key_padding_mask=key_padding_mask)
        if key_padding_mask is not None:
            if attn_mask is not None:
                raise ValueError("attn_mask and key_padding_mask cannot both be given; join them into one mask")
            return multihead.make_mask(key_padding_mask, use_time_mask=False, additive=additive)
        if attn_mask is None:
            return None
        if additive:
            raise ValueError("mask_additive=True takes a key_padding_mask, not an attn_mask")
        if isinstance(attn_mask, str):
            if attn_mask != CAUSAL:
                raise ValueError(f"attn_mask={attn_mask!r} must be a tensor or {CAUSAL!r}")
            return multihead.Mask(multihead.MaskKind.CAUSAL)
        check_tensors(attn_mask=attn_mask)
        return multihead.make_mask(attn_mask, use_time_mask=True, additive=False)

    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, {self.num_heads}, dropout={self.dropout}, bias={self.bias}, "
            f"include_norm_add={self.include_norm_add}, impl={self.impl!r}"
        )
