"""Attention of one sequence's layer norm to another sequence, added to the first sequence."""

from ._functions import FastEncdecAttnNormAddFunc as FastEncdecAttnNormAddFunc

fast_encdec_attn_norm_add_func = FastEncdecAttnNormAddFunc.apply
