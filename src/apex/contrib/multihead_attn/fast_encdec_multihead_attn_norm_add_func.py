"""Attention of the layer norm of one sequence to another, added to the first."""

from ._functions import FastEncdecAttnNormAddFunc as FastEncdecAttnNormAddFunc

fast_encdec_attn_norm_add_func = FastEncdecAttnNormAddFunc.apply
