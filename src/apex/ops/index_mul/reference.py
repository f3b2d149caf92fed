"""Products with indexed rows in PyTorch operators: the definition, and the implementation when no kernel runs.

Runs on any device in any floating dtype; half precision is multiplied and summed in float32. Differentiable, and
deterministic on every device: an embedding's backward pass adds rows of the same index in order, while `index_add`
does not on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._library import compute_dtype


def forward(in1: Tensor, in2: Tensor, index: Tensor) -> Tensor:
    """Return in1[index] * in2."""
    if not in2.numel():  # on a GPU the derivative of an embedding without columns reads memory out of bounds
        return in2 + in1.sum()
    dtype = compute_dtype(in2)
    return (torch.embedding(in1.to(dtype), index) * in2.to(dtype)).to(in2.dtype)


def backward_backward(
    grad_grad1: Tensor, grad_grad2: Tensor, grad_out: Tensor, in1: Tensor, in2: Tensor, index: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of grad_out, in1 and in2, given the gradients of grad1 and grad2."""
    dtype = compute_dtype(in2)
    first, second, gradient = (tensor.to(dtype) for tensor in (grad_grad1, grad_grad2, grad_out))
    picked = torch.embedding(first, index)
    of_grad_out = picked * in2.to(dtype) + second * torch.embedding(in1.to(dtype), index)
    of_in1 = torch.ops.aten.embedding_dense_backward(second * gradient, index, in1.shape[0], -1, False)
    of_in2 = picked * gradient
    return of_grad_out.to(grad_out.dtype), of_in1.to(in1.dtype), of_in2.to(in2.dtype)
