"""Upstream's compiled module of this name: causal softmax of scores [batches, queries, keys], without autograd."""

from __future__ import annotations

from torch import Tensor

from apex.ops.softmax import SoftmaxSpec, softmax_backward, softmax_forward


def forward(input: Tensor, scale_factor: float) -> Tensor:
    return softmax_forward(input, None, SoftmaxSpec(float(scale_factor), causal=True))[0]


def backward(output_grads: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    """Return the gradient of the input; `output_grads` is not changed."""
    return softmax_backward(output_grads, softmax_results, SoftmaxSpec(float(scale_factor), causal=True))
