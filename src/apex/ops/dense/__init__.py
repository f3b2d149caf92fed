"""Dense layers: one layer, two with gelu between them, and the multi-layer perceptron."""

from . import library_ops  # noqa: F401  registers torch.ops.apex.activation_backward and wgrad_gemm_accum
from .autograd import (
    DenseNoBiasFunc,
    FusedDenseFunc,
    FusedDenseGeluDenseFunc,
    dense,
    dense_gelu_dense,
    dense_gelu_dense_backward,
    dense_gelu_dense_forward,
)
from .op import FAMILY, activation_backward, wgrad_gemm_accum
from .perceptron import MlpFunction, mlp, mlp_backward, mlp_forward, split_mlp

__all__ = [
    "FAMILY",
    "DenseNoBiasFunc",
    "FusedDenseFunc",
    "FusedDenseGeluDenseFunc",
    "MlpFunction",
    "activation_backward",
    "dense",
    "dense_gelu_dense",
    "dense_gelu_dense_backward",
    "dense_gelu_dense_forward",
    "mlp",
    "mlp_backward",
    "mlp_forward",
    "split_mlp",
    "wgrad_gemm_accum",
]
