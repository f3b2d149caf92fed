"""Fused dense layers: modules, functions and the autograd Functions that clients call by name.

gelu uses the tanh form, like upstream's BLAS library. Under autocast (and so under `apex.amp` O1) the functions and
modules run in autocast's dtype. Inputs may have any number of dimensions, the last being the features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import init

from ..ops.dense import DenseNoBiasFunc as DenseNoBiasFunc
from ..ops.dense import FusedDenseFunc as FusedDenseFunc
from ..ops.dense import FusedDenseGeluDenseFunc as FusedDenseGeluDenseFunc
from ..ops.dense import dense, dense_gelu_dense


def fused_dense_function(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a dense layer: `input` [..., in], `weight` [out, in], `bias` [out]."""
    return dense(input, weight, bias)


def dense_no_bias_function(input: Tensor, weight: Tensor) -> Tensor:
    """Compute a dense layer without bias."""
    return dense(input, weight)


def fused_dense_gelu_dense_function(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
) -> Tensor:
    """Compute two dense layers with gelu between them."""
    return dense_gelu_dense(input, weight1, bias1, weight2, bias2)


def _reset(weight: Tensor, bias: Tensor | None) -> None:
    """Initialize weight and bias like `torch.nn.Linear`."""
    init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] else 0
        init.uniform_(bias, -bound, bound)


class FusedDense(nn.Module):
    """A dense layer that can replace `torch.nn.Linear`."""

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters like `torch.nn.Linear`."""
        _reset(self.weight, self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return dense(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class FusedDenseGeluDense(nn.Module):
    """Two dense layers with gelu (the tanh form) between them."""

    bias1: nn.Parameter | None
    bias2: nn.Parameter | None

    def __init__(self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features = in_features
        self.intermediate_features = intermediate_features
        self.out_features = out_features
        self.weight1 = nn.Parameter(torch.empty(intermediate_features, in_features))
        self.register_parameter("bias1", nn.Parameter(torch.empty(intermediate_features)) if bias else None)
        self.weight2 = nn.Parameter(torch.empty(out_features, intermediate_features))
        self.register_parameter("bias2", nn.Parameter(torch.empty(out_features)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters of both layers like `torch.nn.Linear`."""
        _reset(self.weight1, self.bias1)
        _reset(self.weight2, self.bias2)

    def forward(self, input: Tensor) -> Tensor:
        return dense_gelu_dense(input, self.weight1, self.bias1, self.weight2, self.bias2)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, intermediate_features={self.intermediate_features}, "
            f"out_features={self.out_features}, bias={self.bias1 is not None}"
        )
