"""Functions of `torch` by their dtype under O1; BFLOAT16_FUNCS is for O4."""

import torch

MODULE = torch

CONVOLUTIONS = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc"]

FP16_FUNCS = [
    *CONVOLUTIONS,
    *("prelu", "addmm", "addmv", "addr", "matmul", "mm", "mv", "addbmm", "baddbmm", "bmm", "chain_matmul"),
]

BFLOAT16_FUNCS = list(FP16_FUNCS)

FP32_FUNCS = [
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow", "cumprod", "cumsum", "dist", "logsumexp", "norm", "prod", "std", "sum", "var", "renorm"),
]

# Cast to the widest dtype among the arguments.
CASTS = [
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "scatter_add", "tensordot", "vdot"),
    *("add", "div", "mul", "sub", "eq", "equal", "ge", "gt", "le", "lt", "ne"),
]

# Cast to the widest dtype in the sequence that is the first argument.
SEQUENCE_CASTS = ["cat", "stack"]
