"""Dense layers: one layer, two with gelu between them, and the multi-layer perceptron."""

from .op import (
    DenseNoBiasFunc,
    FusedDenseFunc,
    FusedDenseGeluDenseFunc,
    MlpFunction,
    dense,
    dense_gelu_dense,
    dense_gelu_dense_backward,
    dense_gelu_dense_forward,
    mlp,
    mlp_backward,
    mlp_forward,
    split_mlp,
)
from .parts import FAMILY, activation_backward, wgrad_gemm_accum
