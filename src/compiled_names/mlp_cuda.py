"""Upstream's compiled module of this name: the multi-layer perceptron, forward and backward, without autograd.

`inputs` are the input, the weights and, with `use_bias`, as many biases; `activation` is 0 for none, 1 for relu, 2 for
sigmoid. `forward` returns the result, followed by the outputs of the earlier layers, which `backward` needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex.ops.dense import mlp_backward, mlp_forward, split_mlp

_ACTIVATIONS = {0: "none", 1: "relu", 2: "sigmoid"}


@torch.no_grad()
def forward(use_bias: int, activation: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    input, weights, biases = split_mlp(use_bias, inputs)
    *hidden, output = mlp_forward(input, weights, biases, _ACTIVATIONS[activation])
    return [output, *hidden]


@torch.no_grad()
def backward(
    use_bias: int, activation: int, grad_o: Tensor, fprop_outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of `inputs`, in their order."""
    input, weights, _ = split_mlp(use_bias, inputs)
    output, *hidden = [each.contiguous() for each in fprop_outputs]
    wanted = [True] * len(inputs)
    return mlp_backward(grad_o, input, weights, [*hidden, output], _ACTIVATIONS[activation], wanted)  # type: ignore[return-value]
