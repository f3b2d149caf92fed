"""Gated linear units in PyTorch operators: the definition, and the implementation when no kernel runs.

Runs on any device in any floating dtype; half precision is computed in float32, float64 in float64. Differentiable.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from .._library import compute_dtype

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def activated(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return functional.silu(gate)
    if activation == "relu":
        return functional.relu(gate)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def forward(input: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Return activation(gate) * value in the input's dtype."""
    wide = input.to(compute_dtype(input, bias))
    gate, value = (wide if bias is None else wide + bias).chunk(2, -1)
    return (activated(gate, activation) * value).to(input.dtype)


def pair(gate: Tensor, value: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * value for gate and value in separate tensors of one dtype."""
    wide = compute_dtype(gate)
    return (activated(gate.to(wide), activation) * value.to(wide)).to(gate.dtype)
