"""Products with indexed rows: in1[index] * in2, and two derivatives."""

from . import library_ops  # noqa: F401  registers torch.ops.apex.index_mul*
from .op import (
    FAMILY,
    by_operators,
    check,
    index_mul_backward,
    index_mul_backward_backward,
    index_mul_forward,
    prefers_operators,
)

__all__ = [
    "FAMILY",
    "by_operators",
    "check",
    "index_mul_backward",
    "index_mul_backward_backward",
    "index_mul_forward",
    "prefers_operators",
]
