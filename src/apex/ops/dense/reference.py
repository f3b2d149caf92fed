"""Dense layers with activations in PyTorch operators, in the dtype of their tensors.

In float64 they are the definition that all other implementations are tested against.

Shapes: input [..., in], weight [out, in], bias [out]. `gelu` is the tanh form, `gelu_erf` the exact one, `gelu_quick` a
sigmoid of 1.702 x times x (CLIP's).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .._library import compute_dtype

ACTIVATIONS = ("none", "relu", "sigmoid", "gelu", "gelu_erf", "gelu_quick", "silu", "relu_squared")
GELU_FACTOR, GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715


def activate(values: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return torch.relu(values)
    if activation == "sigmoid":
        return torch.sigmoid(values)
    if activation == "gelu_erf":
        return functional.gelu(values)
    if activation == "gelu_quick":
        wide = values.to(compute_dtype(values))
        return (wide * torch.sigmoid(1.702 * wide)).to(values.dtype)
    if activation == "silu":
        return functional.silu(values)
    if activation == "relu_squared":
        return torch.relu(values).square()
    return functional.gelu(values, approximate="tanh") if activation == "gelu" else values


def gelu_by_sigmoid(values: Tensor) -> Tensor:
    """Return gelu (tanh form) by a sigmoid: Inductor's kernel then has two special functions per value, and no tanh."""
    wide = values.to(compute_dtype(values))
    return (wide * torch.sigmoid(2 * GELU_FACTOR * wide * (1 + GELU_CUBIC * wide * wide))).to(values.dtype)


def activation_backward(dy: Tensor, saved: Tensor, activation: str) -> Tensor:
    """Return the gradient before the activation, given its output (relu, sigmoid) or its input (the others)."""
    if activation == "relu":
        return dy * (saved > 0)
    if activation == "sigmoid":
        return dy * saved * (1 - saved)
    if activation == "gelu":
        # Beyond 10 the derivative is exactly 0 or 1, and its terms may overflow.
        saved = saved.clamp(-10, 10)
        tanh = torch.tanh(GELU_FACTOR * (saved + GELU_CUBIC * saved**3))
        slope = GELU_FACTOR * (1 + 3 * GELU_CUBIC * saved**2)
        return dy * ((1 + tanh) / 2 + saved * (1 - tanh * tanh) * slope / 2)
    if activation == "gelu_erf":
        gate = (1 + torch.erf(saved * math.sqrt(0.5))) / 2
        return dy * (gate + saved * torch.exp(-saved * saved / 2) / math.sqrt(2 * math.pi))
    if activation in ("gelu_quick", "silu"):
        rate = 1.702 if activation == "gelu_quick" else 1.0
        gate = torch.sigmoid(rate * saved)
        return dy * (gate + saved * rate * gate * (1 - gate))
    if activation == "relu_squared":
        return dy * 2 * torch.relu(saved)
    return dy


def dense_gelu_dense(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str = "gelu",
) -> Tensor:
    hidden = functional.linear(input, weight1, bias1)
    return functional.linear(activate(hidden, activation), weight2, bias2)


def mlp(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str) -> Tensor:
    """Return the output of dense layers with an activation after each, the last one too; `biases` may be empty."""
    for layer, weight in enumerate(weights):
        input = activate(functional.linear(input, weight, biases[layer] if biases else None), activation)
    return input


def mlp_backward(
    dy: Tensor, input: Tensor, outputs: Sequence[Tensor], weights: Sequence[Tensor], activation: str
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the gradients of the input, of the weights and of the biases, at the given outputs of every layer.

    In half precision, values that were rounded to zero decide where a relu lets gradients through.
    """
    dweights: list[Tensor] = []
    dbiases: list[Tensor] = []
    inputs = [input, *outputs[:-1]]
    for layer in reversed(range(len(weights))):
        dy = activation_backward(dy, outputs[layer], activation)
        dbiases.insert(0, dy.sum(0))
        dweights.insert(0, dy.t() @ inputs[layer])
        dy = dy @ weights[layer]
    return dy, dweights, dbiases
