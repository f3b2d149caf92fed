"""Upstream's compiled module of this name: dense layers, forward and backward, without autograd.

Inputs have two dimensions. `gelu_in` is the output of the first layer, `output1` its gelu (the tanh form).
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex.ops.dense import dense, dense_gelu_dense_backward, dense_gelu_dense_forward


@torch.no_grad()
def linear_bias_forward(input, weight, bias):
    return dense(input, weight, bias)


@torch.no_grad()
def linear_bias_backward(input, weight, d_output) -> list[Tensor]:
    """Return the gradients of input, weight and bias."""
    return [d_output.mm(weight), d_output.t().mm(input), d_output.sum(0)]


@torch.no_grad()
def linear_gelu_linear_forward(input, weight1, bias1, weight2, bias2) -> list[Tensor]:
    """Return output1, output2 (the result) and gelu_in."""
    output2, gelu_in, output1 = dense_gelu_dense_forward(input, weight1, bias1, weight2, bias2)
    return [output1, output2, gelu_in]


@torch.no_grad()
def linear_gelu_linear_backward(input, gelu_in, output1, weight1, weight2, d_output2) -> list[Tensor]:
    """Return the gradients of input, weight1, bias1, weight2 and bias2."""
    return list(dense_gelu_dense_backward(d_output2, input, gelu_in, output1, weight1, weight2))  # type: ignore[arg-type]
