"""Self attention of the input's layer norm, added to the input."""

from ._functions import FastSelfAttnNormAddFunc as FastSelfAttnNormAddFunc

fast_self_attn_norm_add_func = FastSelfAttnNormAddFunc.apply
