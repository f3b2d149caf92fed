"""Self attention of the layer norm of its input, added to the input."""

from ._functions import FastSelfAttnNormAddFunc as FastSelfAttnNormAddFunc

fast_self_attn_norm_add_func = FastSelfAttnNormAddFunc.apply
