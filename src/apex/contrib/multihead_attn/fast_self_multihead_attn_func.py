"""Self attention through PyTorch's fused attention."""

from ._functions import FastSelfAttnFunc as FastSelfAttnFunc

fast_self_attn_func = FastSelfAttnFunc.apply
