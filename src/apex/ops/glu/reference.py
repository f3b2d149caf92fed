"""Gated linear units in PyTorch operators: the definition, and the implementation where there is no kernel.

Runs on any device in any floating dtype; half precision is computed in float32, float64 in float64. Differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def activated(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return functional.silu(gate)
    if activation == "relu":
        return functional.relu(gate)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def forward(input: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """activation(gate) * value in the input's dtype."""
    double = torch.float64 in (input.dtype, None if bias is None else bias.dtype)
    wide = input.to(torch.float64 if double else torch.float32)
    gate, value = (wide if bias is None else wide + bias).chunk(2, -1)
    return (activated(gate, activation) * value).to(input.dtype)


def pair(gate: Tensor, value: Tensor, activation: str) -> Tensor:
    """The same of gate and value in tensors of their own, which have one dtype."""
    wide = torch.float64 if gate.dtype == torch.float64 else torch.float32
    return (activated(gate.to(wide), activation) * value.to(wide)).to(gate.dtype)
