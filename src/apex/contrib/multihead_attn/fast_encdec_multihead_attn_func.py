"""Attention of one sequence to another through PyTorch's fused attention."""

from ._functions import FastEncdecAttnFunc as FastEncdecAttnFunc

fast_encdec_attn_func = FastEncdecAttnFunc.apply
