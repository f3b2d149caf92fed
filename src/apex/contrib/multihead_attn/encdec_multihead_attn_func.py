"""Attention of one sequence to another step by step."""

from ._functions import EncdecAttnFunc as EncdecAttnFunc

encdec_attn_func = EncdecAttnFunc.apply
