"""Gated linear units: the first half of the last dimension is the gate, the second the value, as in Megatron's layers.

The input is the output of a linear layer of twice the width without its bias, which is added here.
"""

from __future__ import annotations

from torch import Tensor

from ..ops.glu import bias_glu


def fused_bias_swiglu(input: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute silu(gate) * value of `input` + `bias`; the output has half the input's last dimension and its dtype."""
    return bias_glu(input, bias, "silu")


def fused_bias_geglu(input: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    """Compute gelu(gate) * value of `input` + `bias`; `approximate` is "tanh" or "none", as in PyTorch's gelu."""
    if approximate not in ("tanh", "none"):
        raise ValueError(f'approximate={approximate!r} is not known; use "tanh" or "none"')
    return bias_glu(input, bias, "gelu_tanh" if approximate == "tanh" else "gelu")


def fused_bias_reglu(input: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute relu(gate) * value of `input` + `bias`."""
    return bias_glu(input, bias, "relu")
