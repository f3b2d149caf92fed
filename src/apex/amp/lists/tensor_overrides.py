"""Methods of `torch.Tensor` by their dtype under O1; BFLOAT16_FUNCS is for O4.

In-place methods keep their tensor's dtype and are on no list.
"""

import torch

from . import torch_overrides

MODULE = torch.Tensor


def _methods(names: list[str], *operators: str) -> list[str]:
    return [name for name in names if hasattr(MODULE, name)] + list(operators)


FP16_FUNCS = _methods(torch_overrides.FP16_FUNCS, "__matmul__")

BFLOAT16_FUNCS = list(FP16_FUNCS)

FP32_FUNCS = _methods(torch_overrides.FP32_FUNCS, "__pow__", "__rpow__")

# Cast to the widest dtype among the arguments.
_ARITHMETIC = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__")
_COMPARISONS = ("__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__")
CASTS = _methods(torch_overrides.CASTS, *_ARITHMETIC, *_COMPARISONS)

# No method takes a sequence of tensors.
SEQUENCE_CASTS: list[str] = []
