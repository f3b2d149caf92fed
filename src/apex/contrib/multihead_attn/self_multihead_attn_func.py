"""Self attention step by step."""

from ._functions import SelfAttnFunc as SelfAttnFunc

self_attn_func = SelfAttnFunc.apply
