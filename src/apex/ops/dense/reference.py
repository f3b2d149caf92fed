"""Dense layers with activations in PyTorch operators: the definition that everything else is held against.

Runs on any device in any floating dtype; half precision is computed in float32, float64 in float64.

Shapes: input [rows, in], weight [out, in], bias [out]; `gelu` is the tanh form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ACTIVATIONS = ("none", "relu", "sigmoid", "gelu")
GELU_FACTOR, GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = _wide(input) @ _wide(weight).t()
    return product if bias is None else product + _wide(bias)


def activate(values: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return values.clamp(min=0)
    if activation == "sigmoid":
        return 1 / (1 + torch.exp(-values))
    if activation == "gelu":
        return values * (1 + torch.tanh(GELU_FACTOR * (values + GELU_CUBIC * values**3))) / 2
    return values


def activation_backward(dy: Tensor, saved: Tensor, activation: str) -> Tensor:
    """The gradient before the activation, given its output (relu, sigmoid) or its input (gelu)."""
    dy, saved = _wide(dy), _wide(saved)
    if activation == "relu":
        return dy * (saved > 0)
    if activation == "sigmoid":
        return dy * saved * (1 - saved)
    if activation == "gelu":
        # Beyond 10 the derivative is 0 or 1 to the last digit, and its terms may overflow.
        saved = saved.clamp(-10, 10)
        tanh = torch.tanh(GELU_FACTOR * (saved + GELU_CUBIC * saved**3))
        slope = GELU_FACTOR * (1 + 3 * GELU_CUBIC * saved**2)
        return dy * ((1 + tanh) / 2 + saved * (1 - tanh * tanh) * slope / 2)
    return dy


def dense_gelu_dense(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, the output of the first layer and its gelu."""
    hidden = linear(input, weight1, bias1)
    active = activate(hidden, "gelu")
    return linear(active, weight2, bias2), hidden, active


def dense_gelu_dense_backward(
    dy: Tensor, input: Tensor, hidden: Tensor, active: Tensor, weight1: Tensor, weight2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of input, weight1, bias1, weight2, bias2."""
    dy = _wide(dy)
    dhidden = activation_backward(dy @ _wide(weight2), hidden, "gelu")
    return (
        dhidden @ _wide(weight1),
        dhidden.t() @ _wide(input),
        dhidden.sum(0),
        dy.t() @ _wide(active),
        dy.sum(0),
    )


def mlp(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str) -> list[Tensor]:
    """The output of every layer; each is activated, the last one's too."""
    outputs: list[Tensor] = []
    for weight, bias in zip(weights, biases, strict=True):
        input = activate(linear(input, weight, bias), activation)
        outputs.append(input)
    return outputs


def mlp_backward(
    dy: Tensor, input: Tensor, outputs: Sequence[Tensor], weights: Sequence[Tensor], activation: str
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Gradients of the input, of the weights and of the biases."""
    dweights: list[Tensor] = []
    dbiases: list[Tensor] = []
    gradient = _wide(dy)
    inputs = [input, *outputs[:-1]]
    for layer in reversed(range(len(weights))):
        gradient = activation_backward(gradient, outputs[layer], activation)
        dbiases.insert(0, gradient.sum(0))
        dweights.insert(0, gradient.t() @ _wide(inputs[layer]))
        gradient = gradient @ _wide(weights[layer])
    return gradient, dweights, dbiases
