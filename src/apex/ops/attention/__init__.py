"""Attention with a mask and a bias, and attention within packed sequences."""

from .op_biased import attention
from .op_common import FAMILY
from .op_packed import packed_attention
from .op_varlen import varlen_attention
