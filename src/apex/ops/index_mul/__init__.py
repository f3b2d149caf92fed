"""Products with indexed rows, in1[index] * in2, with first and second derivatives."""

from .op import FAMILY, INDEX_MUL, by_operators, check, index_mul_backward_backward, prefers_operators
