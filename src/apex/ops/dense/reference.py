"""Dense layers with activations in PyTorch operators, in the dtype of their tensors.

In float64 they are the definition that all other implementations are tested against.

Shapes: input [..., in], weight [out, in], bias [out]; `gelu` is the tanh form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .._library import compute_dtype

ACTIVATIONS = ("none", "relu", "sigmoid", "gelu")
GELU_FACTOR, GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715


def activate(values: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return torch.relu(values)
    if activation == "sigmoid":
        return torch.sigmoid(values)
    return functional.gelu(values, approximate="tanh") if activation == "gelu" else values


def gelu_by_sigmoid(values: Tensor) -> Tensor:
    """Return gelu (tanh form) by a sigmoid: Inductor's kernel then has two special functions per value, and no tanh."""
    wide = values.to(compute_dtype(values))
    return (wide * torch.sigmoid(2 * GELU_FACTOR * wide * (1 + GELU_CUBIC * wide * wide))).to(values.dtype)


def activation_backward(dy: Tensor, saved: Tensor, activation: str) -> Tensor:
    """Return the gradient before the activation, given its output (relu, sigmoid) or its input (gelu)."""
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
    return dy


def dense_gelu_dense(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
) -> Tensor:
    hidden = functional.linear(input, weight1, bias1)
    return functional.linear(activate(hidden, "gelu"), weight2, bias2)


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
