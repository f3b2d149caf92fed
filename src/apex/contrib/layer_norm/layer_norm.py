"""FastLayerNorm: layer norm over the last dimension, with upstream's contrib interface and any hidden size."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import init

from ...normalization.fused_layer_norm import mixed_dtype_fused_layer_norm_affine
from ...ops import norm
from ...ops._checks import check_floats


class FastLayerNormFN(torch.autograd.Function):
    """The autograd node of layer norm over the last dimension; the output has gamma's dtype."""

    @staticmethod
    def forward(ctx, x, gamma, beta, epsilon, memory_efficient=False):  # type: ignore[override]
        check_floats(x=x, gamma=gamma, beta=beta)
        return norm.forward_and_save(
            ctx, x, gamma, beta, gamma.shape, epsilon, memory_efficient, subtract_mean=True, out_dtype=gamma.dtype
        )

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        return *norm.NORM.backward_from_saved(ctx, dy), None, None


def _fast_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, memory_efficient: bool = False) -> Tensor:
    """Compute layer norm over the last dimension; the output has the weight's dtype, or autocast's."""
    check_floats(x=x)
    return mixed_dtype_fused_layer_norm_affine(x, weight, bias, weight.shape, epsilon, memory_efficient)


class FastLayerNorm(nn.Module):
    """Layer norm over the last dimension, of size `hidden_size`; the output has the weight's dtype."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__()
        self.epsilon = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.memory_efficient = memory_efficient
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.ones_(self.weight)
        init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return _fast_layer_norm(x, self.weight, self.bias, self.epsilon, self.memory_efficient)
